"""The copy of a run in object storage, against an S3 server: what is there when, and what a new head gets."""

import asyncio
import json
import shutil
import threading

import pytest

from rljob_api.errors import UserError
from rljob_api.run.folder import (
    checkpoint_folder,
    complete_checkpoints,
    damaged_checkpoints,
    export_folder,
    last_checkpoint,
)
from rljob_api.run.origin import FILE_ORIGIN
from rljob_api.run.start_model import FILE_PIN
from rljob_api.run.summaries import BestStep, format_summary
from rljob_inputs.objects.access import ObjectAccess
from rljob_inputs.objects.errors import StorageAwayError
from rljob_inputs.objects.folder import ObjectFolder
from rljob_trainer.history.disk import RunDisk
from rljob_trainer.history.run_state import (
    FILE_DRIVER,
    History,
    begin_checkpoint,
    complete_checkpoint,
    remove_exports,
    remove_old_checkpoints,
    resume,
    set_aside,
)
from rljob_trainer.mirror.mirror import Mirror
from rljob_trainer.mirror.owner import LostOwnershipError, Ownership
from rljob_trainer.outages import OutageError, Outages
from rljob_trainer.run_folder.client import read_run_id
from rljob_trainer.run_folder.file_facts import DamagedCheckpointError, describe_file
from tests.support.objects import BUCKET, run_objects
from tests.support.waiting import DEADLINE_SECONDS

JOB = "default/sums"


@pytest.fixture(scope="module")
def server():
    with run_objects() as running:
        yield running


@pytest.fixture
def prefix(request):
    return f"{request.node.name}/sums"


class Head:
    """A head with its own disk, and what it keeps in the storage."""

    def __init__(
        self, server, prefix, run_dir, *, job=JOB, uid="", environment=None, outage_seconds=60.0, check=lambda: None
    ):
        run_dir.mkdir(exist_ok=True)
        self.run_dir, self.outages, self.waits = run_dir, Outages(outage_seconds), []
        access = ObjectAccess.from_environment(environment or server.environment())
        folder = ObjectFolder(f"s3://{BUCKET}/{prefix}", access)
        job_file = run_dir / "job.yaml"
        job_file.write_text("kind: RLJob\n")
        self.slept = []
        disk = RunDisk(run_dir, self.outages)
        self.mirror = Mirror(
            run_dir, folder, Ownership(folder, job, uid), job_file, self.outages, disk, self.waits.append, check
        )

    async def open(self, during_silence=lambda: None):
        async def sleep(seconds):
            self.slept.append(seconds)
            await during_silence()

        await self.mirror.take_over(sleep)
        await self.mirror.bring_back()
        return self

    def step(self, step, **history):
        """Write what a driver writes until a checkpoint of this step is complete."""
        with (self.run_dir / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n')
            history.setdefault("metrics_bytes", file.tell())
        trajectories = self.run_dir / "trajectories"
        trajectories.mkdir(exist_ok=True)
        (trajectories / f"step-{step:06d}.train.parquet").write_bytes(b"samples of %d" % step)

        async def save(folder):
            (folder / "trainer").mkdir()
            (folder / "trainer" / ".metadata").write_bytes(b"index")
            (folder / "trainer" / "__0_0.distcp").write_bytes(b"weights of %d" % step)

        folder = asyncio.run(begin_checkpoint(self.run_dir, History(step=step, **history), save))
        names = ("trainer/.metadata", "trainer/__0_0.distcp")
        complete_checkpoint(folder, {name: describe_file(folder, name) for name in names})

    async def train(self, step, *, keep=2, others=(), **history):
        await asyncio.to_thread(lambda: self.step(step, **history))
        await self.mirror.save(step, keep=keep, others=others)
        remove_old_checkpoints(self.run_dir, keep=keep, others=others)


def stored(server, prefix):
    return {key.removeprefix(f"{prefix}/") for key in server.keys(f"{prefix}/")}


def steps_in(names):
    return sorted(name.split("/")[1] for name in names if name.endswith("/COMPLETE"))


async def test_head_with_an_empty_disk_resumes_from_the_copy(server, prefix, tmp_path):
    first = await Head(server, prefix, tmp_path / "a").open()
    for step in (1, 2, 3):
        await first.train(step)
    await asyncio.to_thread(lambda: first.step(4))  # complete on its disk alone
    await first.mirror.close()

    second = await Head(server, prefix, tmp_path / "b").open()
    assert read_run_id(tmp_path / "b") == read_run_id(tmp_path / "a"), "so the operator sees the same run"
    history, checkpoint = resume(tmp_path / "b")
    assert (history.step, checkpoint.folder.name) == (3, "step-000003")
    assert (checkpoint.folder / "trainer/__0_0.distcp").read_bytes() == b"weights of 3"
    lines = (tmp_path / "b/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert len(list((tmp_path / "b/trajectories").iterdir())) == 3
    assert second.slept == [], "the first head released the copy"


async def test_model_that_the_run_began_with_stays_pinned(server, prefix, tmp_path):
    first = await Head(server, prefix, tmp_path / "a").open()
    (tmp_path / "a" / FILE_PIN).write_text("step 20")
    await first.train(1)
    await first.mirror.close()
    await Head(server, prefix, tmp_path / "b").open()
    assert (tmp_path / "b" / FILE_PIN).read_text() == "step 20"
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / FILE_PIN).write_text("written by `rljob run`, beside its model")
    await Head(server, prefix, tmp_path / "c").open(during_silence=lambda: asyncio.sleep(0))
    assert "rljob run" in (tmp_path / "c" / FILE_PIN).read_text()


async def test_copy_keeps_as_many_checkpoints_and_the_best(server, prefix, tmp_path):
    head = await Head(server, prefix, tmp_path / "a").open()
    for step in (1, 2, 3, 4):
        await head.train(step, others={1})
    names = stored(server, prefix)
    assert steps_in(names) == ["step-000001", "step-000003", "step-000004"]
    assert not any(name.startswith("checkpoints/step-000002") for name in names)
    assert head.mirror.newest == 4


async def test_complete_is_the_last_file_of_a_checkpoint(server, prefix, tmp_path, monkeypatch):
    head = await Head(server, prefix, tmp_path / "a", outage_seconds=0).open()
    await head.train(1)
    upload = ObjectFolder.upload

    def fail(self, file, name, count):
        if name.endswith("distcp"):
            raise StorageAwayError("s3://bucket: away")
        upload(self, file, name, count)

    monkeypatch.setattr(ObjectFolder, "upload", fail)
    with pytest.raises(OutageError, match=r"spec\.checkpoint\.storage \(s3://bucket/.*away since"):
        await head.train(2)
    assert steps_in(stored(server, prefix)) == ["step-000001"]
    assert head.mirror.newest == 1
    assert sorted(complete_checkpoints(tmp_path / "a")) == [1, 2], "older ones stay until the copy has the new one"
    monkeypatch.undo()

    again = await Head(server, prefix, tmp_path / "a").open()  # with its disk: a restarted container
    assert again.slept == []
    assert steps_in(stored(server, prefix)) == ["step-000001", "step-000002"], "what was missing is uploaded first"


async def test_upload_that_is_repeated_sends_only_what_is_missing(server, prefix, tmp_path, monkeypatch):
    head = await Head(server, prefix, tmp_path / "a").open()
    sent, upload, failures = [], ObjectFolder.upload, [StorageAwayError("away")]

    def fail_once(self, file, name, count):
        if name == FILE_DRIVER and failures:
            raise failures.pop()
        upload(self, file, name, count)
        sent.append(name)

    monkeypatch.setattr(ObjectFolder, "upload", fail_once)
    await head.train(1)
    assert sorted(name for name in sent if name.startswith("trainer/")) == ["trainer/.metadata", "trainer/__0_0.distcp"]
    assert steps_in(stored(server, prefix)) == ["step-000001"]


async def test_damaged_copy_is_set_aside_and_the_one_before_is_used(server, prefix, tmp_path):
    first = await Head(server, prefix, tmp_path / "a").open()
    await first.train(1)
    await first.train(2)
    await first.mirror.close()
    server.put(f"{prefix}/checkpoints/step-000002/trainer/__0_0.distcp", b"weights of X")

    await Head(server, prefix, tmp_path / "b").open()
    history, _ = resume(tmp_path / "b")
    assert history.step == 1
    assert list(damaged_checkpoints(tmp_path / "b")) == ["damaged-step-000002"]


@pytest.mark.parametrize("keep", [1, 2])
async def test_checkpoint_that_was_set_aside_here_goes_once_training_is_past_it(server, prefix, tmp_path, keep):
    head = await Head(server, prefix, tmp_path / "a").open()
    await head.train(2)
    await head.train(4)
    set_aside(tmp_path / "a", DamagedCheckpointError("a file is gone"))
    await head.train(3, keep=keep)
    steps = ["step-000002", "step-000003"]
    assert steps_in(stored(server, prefix)) == steps[-keep:], "a new head must not resume from step 4"


async def test_best_checkpoint_comes_back_too(server, prefix, tmp_path):
    first = await Head(server, prefix, tmp_path / "a").open()
    (tmp_path / "a/best.json").write_text(
        format_summary(BestStep(set="eval", metric="accuracy", value=1.0, low=None, high=None, step=1))
    )
    for step in (1, 2, 3):
        await first.train(step, keep=1, others={1})
    await first.mirror.close()
    await Head(server, prefix, tmp_path / "b").open()
    assert sorted(complete_checkpoints(tmp_path / "b")) == [1, 3]


async def test_disk_that_is_newer_than_the_copy_stays(server, prefix, tmp_path):
    first = await Head(server, prefix, tmp_path / "a").open()
    await first.train(1)
    await asyncio.to_thread(lambda: first.step(2))
    await Head(server, prefix, tmp_path / "a").open()
    assert last_checkpoint(tmp_path / "a") == 2
    assert (tmp_path / "a/metrics.jsonl").read_text().count("\n") == 2, "the copy has one line"
    assert steps_in(stored(server, prefix)) == ["step-000001", "step-000002"]


async def test_repeated_step_replaces_its_checkpoint(server, prefix, tmp_path):
    head = await Head(server, prefix, tmp_path / "a").open()
    await head.train(1)
    shutil.rmtree(checkpoint_folder(tmp_path / "a", 1))
    await head.train(1, seed=7)
    await head.mirror.close()
    await Head(server, prefix, tmp_path / "b").open()
    assert resume(tmp_path / "b")[0].seed == 7


async def test_models_of_steps_are_there_as_long_as_their_checkpoints(server, prefix, tmp_path):
    head = await Head(server, prefix, tmp_path / "a").open()
    for step in (1, 2, 3):
        folder = export_folder(tmp_path / "a", step)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(f"of {step}")
        await head.train(step)
        remove_exports(tmp_path / "a", lambda each: each not in complete_checkpoints(tmp_path / "a"))
        await head.mirror.finish()
    names = {name for name in stored(server, prefix) if name.startswith("exports/")}
    assert names == {"exports/step-000002/config.json", "exports/step-000003/config.json"}


async def test_checkpoint_does_not_wait_for_the_upload_of_an_export(server, prefix, tmp_path, monkeypatch):
    head = await Head(server, prefix, tmp_path / "a").open()
    await head.train(1)
    for step in (1, 2):  # the copy has no checkpoint of step 2 yet
        export_folder(tmp_path / "a", step).mkdir(parents=True)
        (export_folder(tmp_path / "a", step) / "config.json").write_text(f"of {step}")
    begun, may_end, upload = threading.Event(), threading.Event(), ObjectFolder.upload

    def wait(self, file, name, count):
        if file == export_folder(tmp_path / "a", 2) / "config.json":
            begun.set()
            assert may_end.wait(DEADLINE_SECONDS)
        upload(self, file, name, count)

    monkeypatch.setattr(ObjectFolder, "upload", wait)
    exporting = asyncio.create_task(head.mirror._save_exports())
    assert await asyncio.to_thread(begun.wait, DEADLINE_SECONDS)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await head.train(2)
        assert (head.mirror.newest, exporting.done()) == (2, False)
    finally:
        may_end.set()
    await exporting
    names = {name for name in stored(server, prefix) if name.startswith("exports/")}
    assert names == {"exports/step-000001/config.json", "exports/step-000002/config.json"}


async def test_model_whose_checkpoint_is_on_its_way_stays(server, prefix, tmp_path):
    head = await Head(server, prefix, tmp_path / "a").open()
    export_folder(tmp_path / "a", 1).mkdir(parents=True)
    (export_folder(tmp_path / "a", 1) / "config.json").write_text("of 1")
    await head.mirror._save_exports()
    assert "exports/step-000001/config.json" in stored(server, prefix)


async def test_export_and_records_are_there_at_the_end(server, prefix, tmp_path, monkeypatch):
    head = await Head(server, prefix, tmp_path / "a").open()
    await head.train(1)
    server.put(f"{prefix}/export/model-00002-of-00002.safetensors", b"of an earlier export")
    export = tmp_path / "a/export"
    export.mkdir()
    for name in ("config.json", "model.safetensors"):
        (export / name).write_text(name)
    (tmp_path / "a/trajectories/step-000001.train.parquet").unlink()  # the log is full
    (tmp_path / "a/best.json").write_text("{}")
    sent, upload = [], ObjectFolder.upload
    monkeypatch.setattr(ObjectFolder, "upload", lambda *call: (sent.append(call[2]), upload(*call)))
    await head.mirror.finish()
    names = stored(server, prefix)
    assert {name for name in names if name.startswith("export/")} == {"export/config.json", "export/model.safetensors"}
    assert {"best.json", "metrics.jsonl", "job.yaml"} <= names
    assert not any(name.startswith("trajectories/") for name in names)
    assert sent[-2:] == ["model.safetensors", "config.json"], "a folder with config.json is whole"
    assert "metrics.jsonl" not in sent, "the copy has it since the checkpoint"


async def test_another_job_is_refused(server, prefix, tmp_path):
    await Head(server, prefix, tmp_path / "a").open()
    with pytest.raises(UserError, match=r"has the files of the job default/sums; choose another prefix"):
        await Head(server, prefix, tmp_path / "b", job="team/sums").open()


async def test_job_that_may_not_resume_gets_the_records_alone_and_changes_nothing(server, prefix, tmp_path):
    first = await Head(server, prefix, tmp_path / "a").open()
    (tmp_path / "a" / FILE_ORIGIN).write_text("first")
    await first.train(1)
    await first.mirror.close()

    def refuse():
        raise UserError(f"of another job: {(tmp_path / 'b' / FILE_ORIGIN).read_text()}")

    other = Head(server, prefix, tmp_path / "b", check=refuse)
    (tmp_path / "b" / "job.yaml").write_text("another job\n")
    with pytest.raises(UserError, match="of another job: first"):
        await other.open()
    await other.mirror.close(saves=False)
    assert last_checkpoint(tmp_path / "b") is None
    assert server.read(f"{prefix}/job.yaml") == b"kind: RLJob\n"
    again = await Head(server, prefix, tmp_path / "c").open()
    assert again.slept == [], "the refused head released the copy"
    assert last_checkpoint(tmp_path / "c") == 1


async def test_record_that_a_user_removes_from_the_copy_goes_here_too(server, prefix, tmp_path):
    first = await Head(server, prefix, tmp_path / "a").open()
    await first.train(1)
    await first.mirror.close()
    second = Head(server, prefix, tmp_path / "b")
    (tmp_path / "b" / FILE_ORIGIN).write_text("of an earlier try")
    await second.open()
    assert not (tmp_path / "b" / FILE_ORIGIN).exists()


async def test_silent_head_is_replaced_and_a_living_one_is_not(server, prefix, tmp_path):
    first = await Head(server, prefix, tmp_path / "a").open()
    await first.train(1)

    async def renew():
        await asyncio.to_thread(first.mirror._ownership.renew)

    with pytest.raises(UserError, match=r"is written by another run of default/sums .* which is alive; stop it"):
        await Head(server, prefix, tmp_path / "b").open(renew)

    async def nothing():
        pass

    third = await Head(server, prefix, tmp_path / "c").open(nothing)
    assert third.slept == [60.0]
    assert last_checkpoint(tmp_path / "c") == 1
    await asyncio.to_thread(lambda: first.step(2))
    with pytest.raises(LostOwnershipError, match="is now that of another head of default/sums; this head ends"):
        await first.mirror.save(2, keep=2, others=())
    for change in (first.mirror._save_records, first.mirror.finish):
        with pytest.raises(LostOwnershipError):
            await change()
    assert server.read(f"{prefix}/metrics.jsonl") == (tmp_path / "c/metrics.jsonl").read_bytes()
    assert steps_in(stored(server, prefix)) == ["step-000001"], "a head that was replaced changes nothing"
    await first.mirror.close()
    assert third.mirror._ownership.read().released is False, "it does not release the copy of the other"


async def test_of_two_heads_that_find_no_owner_one_begins(server, prefix, tmp_path, monkeypatch):
    first, second = (Head(server, prefix, tmp_path / name) for name in "ab")
    read = second.mirror._ownership.read
    await first.mirror.take_over()
    answers = iter([lambda: None])  # the second head read before the first one wrote
    monkeypatch.setattr(second.mirror._ownership, "read", lambda: next(answers, read)())
    before = server.read(f"{prefix}/owner.json")
    with pytest.raises(LostOwnershipError, match="is now that of another head"):
        await second.mirror.take_over()
    assert server.read(f"{prefix}/owner.json") == before


async def test_pod_in_place_of_a_lost_one_does_not_wait(server, prefix, tmp_path):
    await (await Head(server, prefix, tmp_path / "a", uid="job-1").open()).train(1)
    second = await Head(server, prefix, tmp_path / "b", uid="job-1").open()
    assert second.slept == []
    assert last_checkpoint(tmp_path / "b") == 1


async def test_folder_of_another_run_is_refused(server, prefix, tmp_path):
    first = await Head(server, prefix, tmp_path / "a").open()
    await first.train(1)
    await first.mirror.close()
    other = await Head(server, f"{prefix}-2", tmp_path / "b").open()
    await other.train(1)
    with pytest.raises(UserError, match=r"has another run of default/sums than .*; choose another prefix"):
        await Head(server, prefix, tmp_path / "b").open()


async def test_missing_right_fails_at_the_start(server, prefix, tmp_path):
    with (
        server.only_with("s3:ListBucket", "s3:GetObject") as environment,
        pytest.raises(UserError, match="lacks s3:PutObject on the bucket bucket"),
    ):
        await Head(server, prefix, tmp_path / "a", environment=environment).open()
