"""Writes to a volume that is full, or does not work."""

import errno
import os

import pytest

from rljob_api.errors import UserError
from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import EvaluationRecord, append_records, read_metrics
from rljob_trainer.history.disk import DiskError, RunDisk, disk_errors, find_disk_error
from rljob_trainer.outages import OutageError, Outages


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS])
def test_errors_of_the_volume_are_known_here_and_by_the_text_of_another_process(tmp_path, code):
    for error in (OSError(code, os.strerror(code)), RuntimeError(f"rank 1: {os.strerror(code)}")):
        assert find_disk_error(error) == os.strerror(code)
        with pytest.raises(DiskError, match=f"metrics: {os.strerror(code)}"), disk_errors(tmp_path / "metrics"):
            raise error
    assert find_disk_error(OSError(errno.EACCES, "Permission denied")) == ""


async def test_write_is_repeated_until_there_is_room(tmp_path):
    attempts = []

    def work():
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return "written"

    disk = RunDisk(tmp_path)
    assert await disk.write(tmp_path / "x", work) == "written"
    assert (len(attempts), disk.health.failing_since) == (2, None)


async def test_volume_that_stays_full_ends_the_job_with_what_to_delete(tmp_path):
    complete = tmp_path / "checkpoints" / "step-000002"
    complete.mkdir(parents=True)
    (complete / "COMPLETE").touch()
    os.truncate(complete / "COMPLETE", 3 << 29)  # a file with a hole

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutageError) as raised:
        await RunDisk(tmp_path, Outages(0.5)).write(tmp_path / "metrics.jsonl", full)
    message = str(raised.value)
    assert message.startswith(f"spec.checkpoint ({tmp_path}): away since")
    assert f"{tmp_path}/metrics.jsonl: No space left on device (" in message
    assert "GiB free, a checkpoint has 1.50 GiB)" in message
    assert "free space on the volume, such as checkpoints and exports of earlier runs" in message


async def test_other_errors_are_raised_at_once(tmp_path):
    def wrong():
        raise UserError("wrong")

    with pytest.raises(UserError, match="wrong"):
        await RunDisk(tmp_path).write(tmp_path / "x", wrong)


def test_line_that_finds_no_room_leaves_nothing_of_itself(tmp_path):
    """A limit of the file's size refuses a part of a line."""
    resource = pytest.importorskip("resource")
    path = tmp_path / FILE_METRICS
    record = EvaluationRecord(step=1, time=0.0, seconds=1.0)
    append_records(path, [record])
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_records(path, [record])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size
    append_records(path, [record])
    assert len(read_metrics(path).evaluations) == 2
