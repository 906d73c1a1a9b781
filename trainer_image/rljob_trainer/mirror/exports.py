"""Copies of the models that the run exports. Synchronous.

Invariant: an export in the copy has its config.json only while it is whole. The models of steps
(checkpoint.exportPolicy: every) go when their checkpoints do, here and in the copy.
"""

from collections.abc import Collection
from pathlib import Path

from rljob_api.run.folder import EXPORT, EXPORTS, export_folder, list_exports
from rljob_inputs.objects.folder import Count, ObjectFolder
from rljob_trainer.mirror.states import State, read_state

_LAST = "config.json"
"""Without it, no library takes a folder for a model."""


class ExportCopies:
    def __init__(self, run_dir: Path, folder: ObjectFolder) -> None:
        self._run_dir, self._folder = run_dir, folder
        self._sent: dict[str, dict[str, State]] = {}
        """What the copy has, by folder and name."""

    def save(self, count: Count) -> None:
        """Replace the exports in the copy by those of this run that are new."""
        for local in (self._run_dir / EXPORT, *list_exports(self._run_dir).values()):
            name = local.relative_to(self._run_dir).as_posix()
            try:
                self._replace(name, local, count)
            except FileNotFoundError:
                if local.is_dir():
                    raise
                # Removed meanwhile, as its checkpoint: what was sent has no config.json, and `prune` deletes it.

    def prune(self, steps: Collection[int]) -> None:
        """Delete the models of other steps than these, and those that this run has: a checkpoint may be on its way."""
        kept = {export_folder(Path(), step).name for step in (*steps, *list_exports(self._run_dir))}
        for gone in [name for name in self._sent if name != EXPORT and name.removeprefix(f"{EXPORTS}/") not in kept]:
            del self._sent[gone]
        remote = self._folder / EXPORTS
        names = [name for name in remote.list() if name.partition("/")[0] not in kept]
        for name in sorted(names, key=lambda name: not name.endswith(f"/{_LAST}")):
            remote.delete(name)

    def _replace(self, name: str, local: Path, count: Count) -> None:
        files = {path.relative_to(local).as_posix(): path for path in sorted(local.rglob("*")) if path.is_file()}
        states = {file: state for file, path in files.items() if (state := read_state(path))}
        if not states or states == self._sent.get(name):
            return
        remote = self._folder / name
        before = remote.list()
        for file in sorted(before, key=lambda file: file != _LAST):
            if file == _LAST or file not in files:
                remote.delete(file)
        for file in sorted(files, key=lambda file: file == _LAST):
            remote.upload(files[file], file, count)
        self._sent[name] = states
