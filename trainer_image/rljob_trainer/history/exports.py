"""The models of a run in Hugging Face format: EXPORT, and one for a step in EXPORTS.

Owns the order of writing: a partial folder, the removal of what it replaces, its own name. Invariant: a folder under
its own name is whole, until it no longer has the name.
"""

import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from rljob_api.run.folder import list_exports
from rljob_trainer.concurrency import run_in_thread
from rljob_trainer.history.disk import disk_errors
from rljob_trainer.run_folder.location import EXPORT_PARTIAL

_REMOVED = ".export.removed"


async def write_partial(run_dir: Path, write: Callable[[Path], Awaitable[float | None]]) -> float | None:
    """Let `write` fill a new folder, which `place_export` names. Return what `write` returns."""
    partial = run_dir / EXPORT_PARTIAL
    with disk_errors(partial):
        await run_in_thread(shutil.rmtree, partial, ignore_errors=True)
        partial.mkdir()
        return await write(partial)


def place_export(run_dir: Path, folder: Path) -> None:
    """Replace the export `folder` by what `write_partial` has written."""
    partial = run_dir / EXPORT_PARTIAL
    with disk_errors(folder):
        remove_export(run_dir, folder)
        folder.parent.mkdir(exist_ok=True)
        os.utime(partial)  # later than its checkpoint: `rljob evaluate` compares them
        partial.rename(folder)


def remove_export(run_dir: Path, folder: Path) -> None:
    """Remove an export, if it exists: first its name."""
    removed = run_dir / _REMOVED
    shutil.rmtree(removed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def remove_exports(run_dir: Path, is_gone: Callable[[int], bool]) -> None:
    """Remove the exports of the steps that are gone."""
    for step, folder in list_exports(run_dir).items():
        if is_gone(step):
            remove_export(run_dir, folder)
