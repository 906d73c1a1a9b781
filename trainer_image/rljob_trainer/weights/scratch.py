"""Where weight files are stored between the trainer and the engines: in memory if large enough, else on disk.

A process deletes its folder at its exit; the next process deletes a folder of a killed one.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import psutil

from rljob_api.wire.contract import PATH_SCRATCH

_PREFIX = "rljob-weights-"
_SHARED_MEMORY = Path("/dev/shm")
# By default, Kubernetes gives a container 64 MiB of /dev/shm.
_MIN_SHARED_MEMORY_BYTES = 4 << 30


def open_scratch_folder() -> Path:
    """Create a private folder of this process, deleted when it exits."""
    parent = next(filter(_is_usable, (_SHARED_MEMORY, Path(PATH_SCRATCH))), Path(tempfile.gettempdir()))
    for leftover in parent.glob(f"{_PREFIX}*-*"):
        process_id = leftover.name.removeprefix(_PREFIX).partition("-")[0]
        if process_id.isdigit() and not psutil.pid_exists(int(process_id)):
            shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
    owner = os.getpid()
    # A forked child also runs this at its exit, but only the owner may delete the folder.
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def _is_usable(parent: Path) -> bool:
    if not os.access(parent, os.W_OK | os.X_OK):
        return False
    return parent != _SHARED_MEMORY or shutil.disk_usage(parent).free >= _MIN_SHARED_MEMORY_BYTES
