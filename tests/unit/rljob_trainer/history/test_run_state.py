"""Checkpoints, and histories truncated to them."""

import errno
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rljob_api.errors import UserError
from rljob_api.run.folder import list_exports, trajectory_file
from rljob_trainer.history import run_state as state
from rljob_trainer.history.disk import DiskError
from rljob_trainer.history.run_state import (
    History,
    begin_checkpoint,
    check_disk_space,
    complete_checkpoint,
    remove_old_checkpoints,
    resume,
)
from tests.support.driver_harness import make_job


async def save_checkpoint(run_dir, history, save_trainer, *, keep):
    folder = await begin_checkpoint(run_dir, history, save_trainer)
    complete_checkpoint(folder, {})
    remove_old_checkpoints(run_dir, keep=keep)
    return folder


async def save_nothing(folder):
    (folder / "trainer").mkdir()


def write_steps(run_dir, *steps):
    """Return the bytes of metrics.jsonl."""
    for step in steps:
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"type": "step", "step": step}) + "\n")
        for lane in ("train", "eval"):
            trajectory_file(run_dir, step, lane).parent.mkdir(exist_ok=True)
            trajectory_file(run_dir, step, lane).write_text("")
    return (run_dir / "metrics.jsonl").stat().st_size


async def test_run_without_a_checkpoint_starts_with_empty_files(tmp_path):
    write_steps(tmp_path, 1, 2)
    history, folder = resume(tmp_path)
    assert (history.step, folder) == (0, None)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert list((tmp_path / "trajectories").iterdir()) == []


async def test_resume_returns_the_saved_history_and_truncates_later_entries(tmp_path):
    num_bytes = write_steps(tmp_path, 1, 2)
    saved = History(step=2, metrics_bytes=num_bytes, evaluated_at={"eval": 1}, accuracy_before=0.25)
    folder = await save_checkpoint(tmp_path, saved, save_nothing, keep=2)
    write_steps(tmp_path, 3)
    (tmp_path / "trajectories" / ".step-000003.train.parquet.partial").write_text("torn")
    (tmp_path / "trajectories" / "step-000003.train.copy.parquet").write_text("a user's copy")
    for step in (1, 2, 3):
        (tmp_path / "exports" / f"step-{step:06d}").mkdir(parents=True)
    history, found = resume(tmp_path)
    assert found.folder == folder
    assert history == saved
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert list(list_exports(tmp_path)) == [1, 2]
    assert [file.name for file in sorted((tmp_path / "trajectories").iterdir())] == [
        "step-000001.eval.parquet",
        "step-000001.train.parquet",
        "step-000002.train.parquet",  # step 2 was evaluated after the checkpoint, and will be again
        "step-000003.train.copy.parquet",
    ]


async def test_checkpoint_with_numbers_that_are_not_finite_is_readable(tmp_path):
    """Training skips an update whose gradient is not finite. Its checkpoint must be readable nevertheless."""
    saved = History(step=1, accuracy_after=math.inf, eval_after={"length": math.nan})
    await save_checkpoint(tmp_path, saved, save_nothing, keep=2)
    history, _ = resume(tmp_path)
    assert history.model_dump_json() == saved.model_dump_json()
    assert history.accuracy_after == math.inf


async def test_incomplete_checkpoint_does_not_count_and_is_removed(tmp_path):
    good = await save_checkpoint(tmp_path, History(step=2), save_nothing, keep=2)

    async def dies(folder):
        (folder / "trainer").mkdir()
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await save_checkpoint(tmp_path, History(step=4), dies, keep=2)
    assert resume(tmp_path)[1].folder == good
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


async def test_checkpoint_has_the_history_at_its_beginning_and_counts_at_its_end(tmp_path):
    """Training continues in between."""
    older = await save_checkpoint(tmp_path, History(step=1), save_nothing, keep=1)
    history = History(step=2, samples_trained=8, metrics_bytes=write_steps(tmp_path, 1, 2))
    folder = await begin_checkpoint(tmp_path, history, save_nothing)
    history.step, history.samples_trained = 3, 16
    write_steps(tmp_path, 3)
    assert not state.checkpoint_exists(tmp_path, 2)
    assert older.exists(), "the older one stays until the new one is complete"
    complete_checkpoint(folder, {})
    remove_old_checkpoints(tmp_path, keep=1)
    assert not older.exists()
    resumed, found = resume(tmp_path)
    assert (found.folder, resumed.step, resumed.samples_trained) == (folder, 2, 8)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


async def test_line_that_is_written_and_not_yet_counted_is_written_again(tmp_path):
    """An evaluation ends while a checkpoint begins: a resume evaluates again."""
    history = History(step=2, metrics_bytes=write_steps(tmp_path, 1, 2))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"type": "eval", "step": 2}) + "\n")
    await save_checkpoint(tmp_path, history, save_nothing, keep=1)
    resume(tmp_path)
    assert "eval" not in (tmp_path / "metrics.jsonl").read_text()


async def test_metrics_are_flushed_before_a_checkpoint_is_complete(tmp_path, monkeypatch):
    """A node that loses power loses what was not flushed, and those lines cannot be written again."""
    written = []

    def fsync(descriptor):
        written.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        original_fsync(descriptor)

    original_fsync = os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    write_steps(tmp_path, 1)
    await save_checkpoint(tmp_path, History(step=1), save_nothing, keep=2)
    assert "metrics.jsonl" in written[: written.index(".COMPLETE.partial")]


@pytest.mark.parametrize("steps", [(2, 4, 6), (999_998, 999_999, 1_000_000)])
async def test_newest_checkpoints_are_kept(tmp_path, steps):
    for step in steps:
        newest = await save_checkpoint(tmp_path, History(step=step), save_nothing, keep=2)
    assert resume(tmp_path)[1].folder == newest
    assert {folder.name for folder in (tmp_path / "checkpoints").iterdir()} == {f"step-{n:06d}" for n in steps[1:]}


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("rank 1: No space left on device")]
)
async def test_full_disk_is_an_error_of_the_disk(tmp_path, error):
    async def fails(folder):
        raise error

    with pytest.raises(DiskError, match="step-000002: No space left on device"):
        await save_checkpoint(tmp_path, History(step=2), fails, keep=2)


@pytest.mark.parametrize(
    ("num_models", "spec"),
    [
        (1, {}),
        (2, {"algorithm": {"type": "ppo"}}),  # the critic is as large
        (0, {"trainer": {"lora": {}}}),
    ],
)
def test_job_whose_checkpoints_do_not_fit_is_rejected(tmp_path, monkeypatch, num_models, spec):
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"0" * 2_000_000)
    needed = 3 * num_models * 12_000_000 + 2 * 2_000_000  # with the export and what is published
    checkpoint_bytes = make_job(**spec).spec.checkpoint_bytes
    free = SimpleNamespace(free=needed)
    monkeypatch.setattr(state.shutil, "disk_usage", lambda _: free)
    check_disk_space(tmp_path, model, keep=2, checkpoint_bytes=checkpoint_bytes, num_exports=1)
    free.free = needed - 1
    with pytest.raises(UserError, match=r"GiB free, but 2 checkpoints"):
        check_disk_space(tmp_path, model, keep=2, checkpoint_bytes=checkpoint_bytes, num_exports=1)
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001" / "COMPLETE").touch()
    free.free = 2 * 2_000_000 - 1
    with pytest.raises(DiskError, match="GiB free"):  # it had the room before
        check_disk_space(tmp_path, model, keep=2, checkpoint_bytes=checkpoint_bytes, num_exports=1)


def test_run_that_has_its_exports_needs_room_for_one_more(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"0" * 1_000)
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step:06d}" / "COMPLETE").touch()
        (tmp_path / "exports" / f"step-{step:06d}").mkdir(parents=True)
    free = SimpleNamespace(free=6_000 + 1_000 + 1_000)  # a checkpoint, an export, the published weights
    monkeypatch.setattr(state.shutil, "disk_usage", lambda _: free)
    check_disk_space(tmp_path, model, keep=2, checkpoint_bytes=make_job().spec.checkpoint_bytes, num_exports=3)
    free.free -= 1
    with pytest.raises(DiskError):
        check_disk_space(tmp_path, model, keep=2, checkpoint_bytes=make_job().spec.checkpoint_bytes, num_exports=3)


async def test_error_of_a_driver_file_by_another_version_contains_the_folder_to_remove(tmp_path):
    folder = await begin_checkpoint(tmp_path, History(step=2), save_nothing)
    (folder / "driver.json").write_text('{"step": 2, "unknown": 1}')
    complete_checkpoint(folder, {})
    remove_old_checkpoints(tmp_path, keep=2)
    with pytest.raises(UserError, match=r"remove .*step-000002"):
        resume(tmp_path)
