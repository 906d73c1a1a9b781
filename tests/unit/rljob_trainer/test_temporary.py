"""Temporary folders: what killed processes leave is removed, and nothing else."""

import os

from rljob_trainer.temporary import TemporaryFolder, create_file


def test_folder_ends_with_its_context_and_twice_is_once(tmp_path):
    with TemporaryFolder("ray", tmp_path) as name:
        assert os.path.dirname(name) == str(tmp_path)
        assert os.path.basename(name).startswith("rljob-ray-")
        assert os.stat(name).st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []
    folder = TemporaryFolder("ray", tmp_path)
    folder.cleanup()
    folder.cleanup()
    assert list(tmp_path.iterdir()) == []


def test_folder_whose_process_is_dead_is_removed_by_the_next_of_its_kind(tmp_path):
    living, other = TemporaryFolder("vllm", tmp_path), tmp_path / "rljob-ray-dead"
    dead, dead_file = tmp_path / "rljob-vllm-dead", tmp_path / "rljob-vllm-file"
    for folder in (dead, other):
        folder.mkdir()
    (dead / "log").write_text("left")
    dead_file.write_text("left")
    following = TemporaryFolder("vllm", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {living.path.name, following.path.name, other.name}


def test_file_is_kept_while_its_descriptor_is_open(tmp_path):
    path, descriptor = create_file("ranks", tmp_path)
    _, other = create_file("ranks", tmp_path)
    assert path.exists()
    os.close(descriptor)
    os.close(other)
    last, descriptor = create_file("ranks", tmp_path)
    assert list(tmp_path.iterdir()) == [last]
    os.close(descriptor)


def test_folder_of_another_user_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "rljob-ray-theirs").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    TemporaryFolder("ray", tmp_path).cleanup()
    assert [path.name for path in tmp_path.iterdir()] == ["rljob-ray-theirs"]


def test_end_of_a_forked_process_removes_nothing(tmp_path, monkeypatch):
    folder = TemporaryFolder("ray", tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    folder.cleanup()
    assert folder.path.exists()
