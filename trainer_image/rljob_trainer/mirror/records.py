"""Copies of the run's records, metrics, trajectories and summaries, and of the models that it exports. Synchronous.

Invariants: the copy has at least the lines and samples that its newest checkpoint counts. An export in the copy has its
config.json only while it is whole. Models of steps (checkpoint.exportPolicy: every) go when their checkpoints do, here
and in the copy.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rljob_api.run.folder import (
    EXPORT,
    EXPORTS,
    FILE_BEST,
    FILE_DRIVER_SUMMARY,
    FILE_JOB,
    FILE_METRICS,
    TRAJECTORIES,
    export_folder,
    list_exports,
    list_trajectory_files,
)
from rljob_api.run.origin import FILE_OBJECTS, FILE_ORIGIN
from rljob_api.run.rows import ROWS
from rljob_api.run.start_model import FILE_PIN
from rljob_inputs.objects.folder import ObjectFolder
from rljob_inputs.objects.listing import ObjectFacts
from rljob_inputs.objects.progress import Count
from rljob_trainer.history.run_time import FILE_TIME

State = tuple[int, int]
"""Size, and time in nanoseconds."""


def read_state(path: Path) -> State | None:
    """Return the state of a file; None if it does not exist."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


_FILES = (FILE_METRICS, FILE_DRIVER_SUMMARY, FILE_BEST, FILE_OBJECTS, FILE_ORIGIN, FILE_PIN, FILE_TIME)
_TENSORBOARD = "tensorboard"
_FOLDERS = (ROWS, _TENSORBOARD)
"""Besides trajectories. A file that is gone here stays in the copy."""


@dataclass
class RecordCopies:
    """`job_file`: of the head, which its folder may not have."""

    run_dir: Path
    folder: ObjectFolder
    job_file: Path
    _sent: dict[str, State] = field(default_factory=dict)
    """What the copy has."""

    def recall(self, listed: Mapping[str, ObjectFacts]) -> None:
        """Take over what the copy has. A trajectory file of the same size is the same."""
        for name, path in self._list().items():
            known, here = listed.get(name), read_state(path)
            in_folder = name.startswith((f"{TRAJECTORIES}/", f"{_TENSORBOARD}/"))
            if in_folder and known is not None and here is not None and here[0] == known.size:
                self._sent[name] = here
        self._sent |= {n: (0, 0) for n in listed if n.startswith(f"{TRAJECTORIES}/") and n not in self._sent}

    def bring_back(self, listed: Mapping[str, ObjectFacts], count: Count) -> None:
        """Download all records but the export. Trajectories that only this machine has are of another history."""
        names = [name for name in listed if self.is_record(name)]
        for file in list_trajectory_files(self.run_dir / TRAJECTORIES):
            if f"{TRAJECTORIES}/{file.path.name}" not in listed:
                file.path.unlink()
        if FILE_ORIGIN not in listed:  # removed by a user: any job may go on from the copy's checkpoints
            (self.run_dir / FILE_ORIGIN).unlink(missing_ok=True)
        for name in names:
            if name == FILE_PIN and (self.run_dir / name).is_file():
                continue  # `rljob run` has written it, beside the model
            self.folder.download(name, self.run_dir / name, count)

    @staticmethod
    def is_record(name: str) -> bool:
        return name in _FILES or name.partition("/")[0] in (TRAJECTORIES, *_FOLDERS)

    def save(self, count: Count) -> None:
        """Upload what has changed, and delete trajectories that are gone here."""
        here = self._list()
        for name, path in here.items():
            state = read_state(path)
            if state is not None and state != self._sent.get(name):
                self.folder.upload(path, name, count)
                self._sent[name] = state
        for name in [name for name in self._sent if name not in here and name.startswith(f"{TRAJECTORIES}/")]:
            self.folder.delete(name)
            del self._sent[name]

    def _list(self) -> dict[str, Path]:
        """Return the records that exist here, by name."""
        run_dir = self.run_dir
        found = {FILE_JOB: self.job_file, **{name: run_dir / name for name in _FILES}}
        found |= {f"{TRAJECTORIES}/{f.path.name}": f.path for f in list_trajectory_files(run_dir / TRAJECTORIES)}
        for folder in _FOLDERS:
            files = sorted(path for path in (run_dir / folder).rglob("*") if not path.name.endswith(".partial"))
            found |= {path.relative_to(run_dir).as_posix(): path for path in files}
        return {name: path for name, path in found.items() if path.is_file()}


_LAST = "config.json"
"""Without it, no library takes a folder for a model."""


@dataclass
class ExportCopies:
    run_dir: Path
    folder: ObjectFolder
    _sent: dict[str, dict[str, State]] = field(default_factory=dict)
    """What the copy has, by folder and name."""

    def save(self, count: Count) -> None:
        """Replace the exports in the copy by those of this run that are new."""
        for local in (self.run_dir / EXPORT, *list_exports(self.run_dir).values()):
            name = local.relative_to(self.run_dir).as_posix()
            try:
                self._replace(name, local, count)
            except FileNotFoundError:
                if local.is_dir():
                    raise
                # Removed meanwhile, as its checkpoint: what was sent has no config.json, and `prune` deletes it.

    def prune(self, steps: Collection[int]) -> None:
        """Delete the models of other steps than these, and those that this run has: a checkpoint may be on its way."""
        kept = {export_folder(Path(), step).name for step in (*steps, *list_exports(self.run_dir))}
        for gone in [name for name in self._sent if name != EXPORT and name.removeprefix(f"{EXPORTS}/") not in kept]:
            del self._sent[gone]
        remote = self.folder / EXPORTS
        names = [name for name in remote.list() if name.partition("/")[0] not in kept]
        for name in sorted(names, key=lambda name: not name.endswith(f"/{_LAST}")):
            remote.delete(name)

    def _replace(self, name: str, local: Path, count: Count) -> None:
        files = {path.relative_to(local).as_posix(): path for path in sorted(local.rglob("*")) if path.is_file()}
        states = {file: state for file, path in files.items() if (state := read_state(path))}
        if not states or states == self._sent.get(name):
            return
        remote = self.folder / name
        before = remote.list()
        for file in sorted(before, key=lambda file: file != _LAST):
            if file == _LAST or file not in files:
                remote.delete(file)
        for file in sorted(files, key=lambda file: file == _LAST):
            remote.upload(files[file], file, count)
        self._sent[name] = states
