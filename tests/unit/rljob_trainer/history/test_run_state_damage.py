"""Any damage of any file of a checkpoint is found, by the driver or by a rank, and never loses the one before."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_api.errors import UserError
from rljob_api.run.folder import checkpoint_folder, complete_checkpoints, damaged_checkpoints, last_checkpoint
from rljob_trainer.history import run_state
from rljob_trainer.history.run_state import (
    FILE_DRIVER,
    History,
    begin_checkpoint,
    complete_checkpoint,
    remove_old_checkpoints,
    resume,
    set_aside,
)
from rljob_trainer.policy.checkpoints import verify_checkpoint
from rljob_trainer.run_folder.file_facts import DamagedCheckpointError, describe_file

TRAINER = ("trainer/__0_0.distcp", "trainer/__1_0.distcp", "trainer/.metadata")
FILES = ("COMPLETE", FILE_DRIVER, *TRAINER)


async def save(run_dir: Path, step: int) -> None:
    async def write(folder: Path) -> None:
        (folder / "trainer").mkdir()
        for index, name in enumerate(TRAINER):
            (folder / name).write_bytes(bytes(range(step, step + 40)) * (index + 1))

    folder = await begin_checkpoint(run_dir, History(step=step), write)
    complete_checkpoint(folder, {name: describe_file(folder, name) for name in TRAINER})
    remove_old_checkpoints(run_dir, keep=2)


@pytest.fixture
async def saved(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # disks are slow
    for step in (2, 4):
        await save(tmp_path / "saved", step)
    return tmp_path / "saved"


def start(run_dir: Path, num_ranks: int) -> int:
    """Resume as the driver and its ranks do. Return the step."""
    while True:
        history, checkpoint = resume(run_dir)
        try:
            for rank in range(num_ranks):
                verify_checkpoint(checkpoint, checkpoint.folder, rank, num_ranks)
        except DamagedCheckpointError as error:
            set_aside(run_dir, error)
        else:
            return history.step


def change(path: Path, kind: str, share: float) -> None:
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        os.truncate(path, int(share * path.stat().st_size))
    else:
        content = bytearray(path.read_bytes())
        place = int(share * 8 * len(content))
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # each example copies it
@given(
    name=st.sampled_from(FILES),
    kind=st.sampled_from(["flipped", "truncated", "missing"]),
    share=st.floats(0, 1, exclude_max=True),
    num_ranks=st.integers(1, 4),
)
def test_any_damage_is_found_and_named(saved, name, kind, share, num_ranks):
    run_dir = saved.with_name("run")
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.copytree(saved, run_dir)
    change(checkpoint_folder(run_dir, 4) / name, kind, share)
    is_incomplete = (name, kind) == ("COMPLETE", "missing")  # then it never counted
    assert start(run_dir, num_ranks) == 2
    assert list(complete_checkpoints(run_dir)) == [2]
    found = damaged_checkpoints(run_dir)
    assert list(found) == ([] if is_incomplete else ["damaged-step-000004"])
    assert is_incomplete or f"step-000004/{name} " in found["damaged-step-000004"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_intact_checkpoint_is_the_one_to_resume_from(saved, num_ranks):
    assert start(saved, num_ranks) == 4
    assert damaged_checkpoints(saved) == {}


@pytest.mark.parametrize("dies_in", ["write_durably", "sync"])
def test_crash_while_a_checkpoint_is_set_aside_changes_nothing(saved, monkeypatch, dies_in):
    change(checkpoint_folder(saved, 4) / FILE_DRIVER, "flipped", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(run_state, dies_in, raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            resume(saved)
    assert start(saved, 1) == 2
    assert "driver.json has the hash" in damaged_checkpoints(saved)["damaged-step-000004"]


def raise_interrupt(*_):
    raise KeyboardInterrupt


async def test_second_damage_of_a_step_is_kept_next_to_the_first(saved):
    for _ in range(2):
        change(checkpoint_folder(saved, 4) / "trainer/__1_0.distcp", "truncated", 0.5)
        assert start(saved, 2) == 2
        await save(saved, 4)
    assert list(damaged_checkpoints(saved)) == ["damaged-step-000004", "damaged-step-000004-2"]
    assert last_checkpoint(saved) == 4


def test_damaged_checkpoints_alone_are_an_error_until_the_user_decides(saved):
    for step in (2, 4):
        change(checkpoint_folder(saved, step) / FILE_DRIVER, "truncated", 0.5)
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"no checkpoint is intact \(damaged-step-000002: .*step-000002/driver.json"
        ):
            resume(saved)
    for folder in (saved / "checkpoints").iterdir():
        shutil.rmtree(folder)
    assert resume(saved) == (History(), None)


def test_error_of_a_disk_is_not_a_damage(saved, monkeypatch):
    """A file system that does not answer sets no checkpoint aside."""
    monkeypatch.setattr(run_state, "verify_files", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        run_state.resume(saved)
    assert last_checkpoint(saved) == 4
