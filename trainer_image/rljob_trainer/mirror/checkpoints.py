"""Copies of the run's checkpoints. Synchronous.

    all files --> COMPLETE --> older ones lose COMPLETE, then their files

Invariants: a checkpoint in the copy that has COMPLETE is whole; one that is replaced, or removed, loses COMPLETE first.
An upload that is repeated sends only what is missing.
"""

import logging
import re
import shutil
from collections.abc import Callable, Collection, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rljob_api.run.folder import CHECKPOINTS, FILE_COMPLETE, checkpoint_folder
from rljob_inputs.objects.folder import ObjectFolder
from rljob_inputs.objects.listing import ObjectFacts
from rljob_inputs.objects.progress import Count
from rljob_trainer.history.damage import open_checkpoint, set_aside
from rljob_trainer.history.disk import write_durably
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
