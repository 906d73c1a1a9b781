"""The copy of a run beside its driver: what the driver and the head call, and the copies of its checkpoints.

    open: owner.json is ours --> what the folder lacks comes back --> what the copy lacks is uploaded
    save: records, checkpoint, COMPLETE, then older ones are removed: beside training, once the ranks have written it
    watch: renews owner.json, and uploads records and exports that have changed
    finish: the last records and exports

Transfers run in threads, two at a time: one of the records and checkpoints, and one of the exports, which may take as
long as several steps. A storage that answered and does not now, or refuses, is an outage: it is waited for, and the
status names it. Invariants: the copy is changed only by the head that owner.json names. A checkpoint in the copy that
has COMPLETE is whole; one that is replaced, or removed, loses COMPLETE first. An upload that is repeated sends only
what is missing.
"""

import asyncio
import contextlib
import logging
import re
import shutil
import threading
from collections.abc import Awaitable, Callable, Collection, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from rljob_api.errors import UserError
from rljob_api.run.folder import CHECKPOINTS, FILE_COMPLETE, checkpoint_folder, complete_checkpoints, last_checkpoint
from rljob_inputs.objects.errors import RefusedObjectError, StorageAwayError
from rljob_inputs.objects.folder import ObjectFolder, TransferEndedError
from rljob_inputs.objects.listing import ObjectFacts
from rljob_inputs.objects.progress import Count, Progress
from rljob_trainer.concurrency import run_all
from rljob_trainer.history.disk import RunDisk, disk_errors, write_durably
from rljob_trainer.history.run_state import open_checkpoint, read_best, set_aside
from rljob_trainer.mirror.owner import RENEW_SECONDS, SILENCE_SECONDS, Owner, Ownership, refuse_living
from rljob_trainer.mirror.records import ExportCopies, RecordCopies
from rljob_trainer.outages import Outages, wait_out
from rljob_trainer.run_folder.client import read_run_id, write_run_id
from rljob_trainer.run_folder.file_facts import DamagedCheckpointError, verify_files

log = logging.getLogger(__name__)

_NAME = re.compile(rf"{CHECKPOINTS}/step-(\d{{6,}})/(.+)")
_MAX_UPLOADS = 4
"""Files at the same time."""
Begin = Callable[[str, int], Count]
"""Says that a transfer of so many bytes begins, and returns what counts them."""


@dataclass
class CheckpointCopies:
    run_dir: Path
    folder: ObjectFolder
    _complete: dict[int, bytes] = field(default_factory=dict)
    """COMPLETE of those in the copy, by step."""
    _sent: dict[int, dict[str, str]] = field(default_factory=dict)
    """By step and name: the hashes of what an unfinished upload has sent."""

    @property
    def newest(self) -> int | None:
        """The step of the newest whole checkpoint in the copy."""
        return max(self._complete, default=None)

    @property
    def steps(self) -> Collection[int]:
        """Those of the whole checkpoints in the copy, now: another thread may ask while one is uploaded."""
        return tuple(self._complete)

    def recall(self, listed: Mapping[str, ObjectFacts]) -> None:
        """Take over what the copy has."""
        complete = [step for step, files in _by_step(listed).items() if FILE_COMPLETE in files]
        found = {step: self._open(step).read(FILE_COMPLETE) for step in complete}
        self._complete = {step: content for step, content in found.items() if content is not None}

    def bring_back(self, listed: Mapping[str, ObjectFacts], begin: Begin) -> int | None:
        """Download the newest checkpoint that is intact, and return its step. Damaged ones are set aside here."""
        files = _by_step(listed)
        for step in sorted(self._complete, reverse=True):
            count = begin(f"downloads the checkpoint of step {step}", sum(found.size for found in files[step].values()))
            try:
                self._download(step, files[step], count)
                return step
            except DamagedCheckpointError as error:
                set_aside(self.run_dir, error)
        return None

    def bring_back_other(self, step: int, listed: Mapping[str, ObjectFacts], begin: Begin) -> None:
        """Download one that the run does not resume from. A damaged one is left out."""
        files = _by_step(listed).get(step, {})
        if step not in self._complete:
            return
        count = begin(f"downloads the checkpoint of step {step}", sum(found.size for found in files.values()))
        try:
            self._download(step, files, count)
        except DamagedCheckpointError as error:
            log.warning("the checkpoint of step %d is not brought back: %s", step, error)
            shutil.rmtree(checkpoint_folder(self.run_dir, step))

    def save(self, step: int, begin: Begin) -> None:
        """Upload a complete checkpoint, unless the copy has it."""
        local, remote = checkpoint_folder(self.run_dir, step), self._open(step)
        complete = (local / FILE_COMPLETE).read_bytes()
        if self._complete.get(step) == complete:
            return
        self._discard(step)
        files, sent = open_checkpoint(local).files, self._sent.setdefault(step, {})
        missing = {name: facts for name, facts in files.items() if sent.get(name) != facts.hash}
        count = begin(f"uploads the checkpoint of step {step}", sum(facts.num_bytes for facts in missing.values()))

        def upload(name: str) -> None:
            remote.upload(local / name, name, count)
            sent[name] = missing[name].hash

        with ThreadPoolExecutor(_MAX_UPLOADS) as pool:
            list(pool.map(upload, missing))
        for name in remote.list().keys() - files.keys():  # of an earlier attempt, by another head
            remote.delete(name)
        remote.write(FILE_COMPLETE, complete)
        self._complete[step] = complete
        del self._sent[step]

    def prune(self, last: int, keep: int, others: Container[int]) -> None:
        """Delete all but the newest `keep` up to the step `last`, and those of the steps `others`; also what is not
        whole. Later ones are of a history that ended with a damaged checkpoint: a head would resume from them."""
        newest = sorted(step for step in self._complete if step <= last)[-keep:]
        listed = (self.folder / CHECKPOINTS).list()
        for step, files in _by_step({f"{CHECKPOINTS}/{name}": facts for name, facts in listed.items()}).items():
            if step in self._complete and (step in newest or step in others):
                continue
            self._discard(step)
            for name in files.keys() - {FILE_COMPLETE}:
                self._open(step).delete(name)

    def _discard(self, step: int) -> None:
        if step in self._complete:
            self._open(step).delete(FILE_COMPLETE)
            del self._complete[step]

    def _download(self, step: int, files: Mapping[str, ObjectFacts], count: Count) -> None:
        local, remote = checkpoint_folder(self.run_dir, step), self._open(step)
        for name in files:
            if name != FILE_COMPLETE:
                remote.download(name, local / name, count)
        write_durably(local / FILE_COMPLETE, self._complete[step].decode(errors="replace"))
        found = open_checkpoint(local)
        verify_files(local, found.files, found.files)

    def _open(self, step: int) -> ObjectFolder:
        return self.folder / checkpoint_folder(Path(), step).as_posix()


def _by_step(listed: Mapping[str, ObjectFacts]) -> dict[int, dict[str, ObjectFacts]]:
    found: dict[int, dict[str, ObjectFacts]] = {}
    for name, facts in listed.items():
        if match := _NAME.fullmatch(name):
            found.setdefault(int(match[1]), {})[match[2]] = facts
    return found


_REMEDY = "check the network, the credentials and the bucket of spec.checkpoint.storage"
_RECORDS_SECONDS = 60.0
_RELEASE_SECONDS = 5.0
"""For the last records and the release, when a head is stopped."""
_Result = TypeVar("_Result")
Sleep = Callable[[float], Awaitable[None]]


class Mirror:
    def __init__(
        self,
        run_dir: Path,
        folder: ObjectFolder,
        ownership: Ownership,
        job_file: Path,
        outages: Outages,
        disk: RunDisk,
        report: Callable[[str], None],
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """`folder`: of this job alone. `report`: gets what the head waits for. `check`: called with the copy's records
        in the run's folder, before its checkpoints come; raises UserError if this job may not resume from them."""
        self._run_dir, self._folder, self._ownership, self._disk = run_dir, folder, ownership, disk
        owned = replace(folder, before_change=ownership.check)
        self._records = RecordCopies(run_dir, owned, job_file)
        self._checkpoints = CheckpointCopies(run_dir, owned)
        self._exports = ExportCopies(run_dir, owned)
        self._health = outages.watch(f"spec.checkpoint.storage ({folder.url})", _REMEDY)
        self._report, self._check, self._is_ours = report, check, False
        self._lock, self._exports_lock = asyncio.Lock(), asyncio.Lock()

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint in the copy."""
        return self._checkpoints.newest

    async def take_over(self, sleep: Sleep = asyncio.sleep) -> None:
        """Become the owner; the folder gets the copy's id. Raise UserError if the copy is of another job, or of a run
        that is alive or has another history than the folder."""
        found = await self._do(lambda _: self._ownership.read())
        run_id = read_run_id(self._run_dir)
        is_new = last_checkpoint(self._run_dir) is None
        if self._ownership.judge(found, run_id) == "watch":
            assert found is not None
            await self._watch_other(found, run_id, sleep)
        if found is not None and run_id != found.run_id:
            if not is_new:
                raise UserError(
                    f"spec.checkpoint.storage: {self._folder.url} has another run of {found.job} than {self._run_dir}; "
                    "choose another prefix, or move one of them away"
                )
            run_id = found.run_id
            write_run_id(self._run_dir, run_id)
        await self._do(lambda _: self._ownership.take(run_id, is_new=found is None))
        self._is_ours = True

    async def _watch_other(self, found: Owner, run_id: str, sleep: Sleep) -> None:
        log.info("%s was not released; waiting %.0f s for a sign of life", self._folder.url, SILENCE_SECONDS)
        self._report(f"waits {SILENCE_SECONDS:.0f} s whether the last run of {self._folder.url} is alive")
        await sleep(SILENCE_SECONDS)
        now = await self._do(lambda _: self._ownership.read())
        if now is not None and now != found and self._ownership.judge(now, run_id) == "watch":
            raise refuse_living(now, self._folder.url)

    async def bring_back(self) -> None:
        """Download what a resume needs, unless the folder has it; then upload what the copy lacks. Raise UserError if
        the copy is not of this job: it stays as it was."""
        listed = await self._transfer(lambda _: self._folder.list())
        await self._transfer(lambda _: self._checkpoints.recall(listed))
        if (self.newest or 0) > (last_checkpoint(self._run_dir) or 0):
            self._report(f"brings back the run from {self._folder.url}")
            await self._transfer(partial(self._bring_back, listed))
        self._records.recall(listed)
        await self._transfer(self._catch_up)

    def _bring_back(self, listed: Mapping[str, ObjectFacts], begin: Begin) -> None:
        num_bytes = sum(facts.size for name, facts in listed.items() if self._records.is_record(name))
        self._records.bring_back(listed, begin(f"downloads the records of {self._folder.url}", num_bytes))
        self._check()
        step = self._checkpoints.bring_back(listed, begin)
        best = read_best(self._run_dir)
        if best is not None and best.step != step:
            self._checkpoints.bring_back_other(best.step, listed, begin)
        found = "no intact checkpoint" if step is None else f"the checkpoint of step {step}"
        log.info("brought back %s from %s", found, self._folder.url)

    def _catch_up(self, begin: Begin) -> None:
        """Upload what the head before could not."""
        for step in complete_checkpoints(self._run_dir):
            self._records.save(begin("", 0))
            self._checkpoints.save(step, begin)

    async def save(self, step: int, *, keep: int, others: Container[int]) -> None:
        """Upload the complete checkpoint of a step, with the records; then remove all but the newest `keep`, and those
        of the steps `others`."""

        def work(begin: Begin) -> None:
            self._records.save(begin("", 0))
            self._checkpoints.save(step, begin)
            self._checkpoints.prune(step, keep, others)

        await self._transfer(work)

    async def watch(self) -> NoReturn:
        """Renew the ownership, and upload records and exports. Raise LostOwnershipError, and OutageError."""
        await run_all([self.renew(), self._repeat(self._save_records), self._repeat(self._save_exports)])
        raise AssertionError("neither ends")

    async def renew(self) -> NoReturn:
        """Show that this head is alive, also while a transfer takes long."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            await self._do(lambda _: self._ownership.renew())

    @staticmethod
    async def _repeat(save: Callable[[], Awaitable[None]]) -> NoReturn:
        while True:
            await asyncio.sleep(_RECORDS_SECONDS)
            await save()

    async def _save_records(self) -> None:
        await self._transfer(lambda begin: self._records.save(begin("", 0)))

    async def _save_exports(self) -> None:
        """Upload new exports, and delete those whose checkpoints are gone. The next checkpoint does not wait for it."""

        def work(begin: Begin) -> None:
            self._exports.save(begin("", 0))
            self._exports.prune(self._checkpoints.steps)

        await self._transfer(work, self._exports_lock)

    async def finish(self) -> None:
        """Upload the last records and the export, after the last step."""
        await self._save_records()
        await self._save_exports()

    async def close(self, *, saves: bool = True) -> None:
        """Release the copy, with the last records if that takes seconds. Errors are logged: they are not why. Without
        `saves`, the records in the copy stay."""
        if not self._is_ours:
            return

        def work(begin: Begin) -> None:
            if saves:
                with contextlib.suppress(TransferEndedError):
                    self._records.save(begin("", 0))
            self._ownership.release()

        try:
            async with asyncio.timeout(_RELEASE_SECONDS), self._lock, self._exports_lock:
                await _run_interruptibly(work)
        except Exception as error:
            log.warning("%s is not released: %s", self._folder.url, error)

    async def _transfer(self, work: Callable[[Begin], _Result], lock: asyncio.Lock | None = None) -> _Result:
        """Return the result of `work` once no other transfer has the lock; default: that of records and checkpoints."""
        async with lock or self._lock:
            return await self._disk.run(self._run_dir, partial(self._do, work))

    async def _do(self, work: Callable[[Begin], _Result]) -> _Result:
        """Return the result of `work`, which runs in a thread, again while the storage is away."""

        async def attempt() -> _Result:
            with disk_errors(self._run_dir):
                return await _run_interruptibly(work)

        return await wait_out(self._health, attempt, self._explain)

    def _explain(self, error: Exception) -> str:
        is_refused = self._is_ours and isinstance(error, RefusedObjectError)
        return str(error) if is_refused or isinstance(error, StorageAwayError) else ""


async def _run_interruptibly(work: Callable[[Begin], _Result]) -> _Result:
    """Run `work` in a thread. A cancellation ends its transfer, and is raised once the thread has ended."""
    stop = threading.Event()

    def begin(what: str, total: int) -> Count:
        progress = Progress(what, total, log.info) if what else None

        def count(num_bytes: int) -> None:
            if stop.is_set():
                raise TransferEndedError
            if progress is not None:
                progress.add(num_bytes)

        return count

    running = asyncio.ensure_future(asyncio.to_thread(work, begin))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({running})
        raise
