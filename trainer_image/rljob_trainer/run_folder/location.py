"""Where a run's folder is, and whether this process sees it.

The head alone owns the folder: it creates, completes and deletes what is in it. Ranks write into it if their Pod mounts
the same claim, or runs on the same machine; others send their files to the head. Invariant: a rank never takes a folder
in its Pod for the run's, because it compares the id that is stored in the folder.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path

FILE_ID = ".run-id"
EXPORT_PARTIAL = ".export.partial"
"""Folder of the run in which rank 0 writes the export."""


@dataclass(frozen=True)
class RunFolder:
    """The run's folder on the head, as the ranks get it."""

    path: Path
    id: str
    url: str
    """Where the head serves the files of the folder."""

    def is_visible(self) -> bool:
        """Whether this process sees the folder, and not another one at its path."""
        try:
            return (self.path / FILE_ID).read_text() == self.id
        except OSError:
            return False


def read_run_id(run_dir: Path) -> str:
    """Return the id of the run's folder. A folder without one, such as a new emptyDir, gets it."""
    if not (run_dir / FILE_ID).exists():
        write_run_id(run_dir, secrets.token_hex(8))
    return (run_dir / FILE_ID).read_text()


def write_run_id(run_dir: Path, run_id: str) -> None:
    """Make a folder that of a run which was elsewhere before."""
    partial = run_dir / f"{FILE_ID}.partial"
    partial.write_text(run_id)
    partial.replace(run_dir / FILE_ID)
