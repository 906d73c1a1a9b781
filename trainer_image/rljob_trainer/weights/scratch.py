"""Where weight files are stored between the trainer and the engines: in memory if they fit, else on disk.

A process deletes its folder at its exit; the next process deletes a folder of a killed one.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import psutil

from rljob_api.errors import UserError

_PREFIX = "rljob-weights-"
_SHARED_MEMORY = Path("/dev/shm")
_MIN_SHARED_MEMORY_BYTES = 4 << 30
"""Less is for others, such as NCCL and Ray: by default, a container without a volume there has 64 MiB."""


def open_scratch_folder(num_bytes: int) -> Path:
    """Create a private folder of this process, deleted when it exits, where `num_bytes` are free. Raise UserError if
    there is no such place."""
    parent = _choose_parent(num_bytes)
    for leftover in parent.glob(f"{_PREFIX}*-*"):
        process_id = leftover.name.removeprefix(_PREFIX).partition("-")[0]
        if process_id.isdigit() and not psutil.pid_exists(int(process_id)):
            shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
    owner = os.getpid()
    # A forked child also runs this at its exit, but only the owner may delete the folder.
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def _choose_parent(num_bytes: int) -> Path:
    disk = Path(tempfile.gettempdir())
    free = {folder: _free_bytes(folder) for folder in (_SHARED_MEMORY, disk)}
    if free[_SHARED_MEMORY] >= max(num_bytes, _MIN_SHARED_MEMORY_BYTES):
        return _SHARED_MEMORY
    if free[disk] >= num_bytes:
        return disk
    places = ", ".join(f"{folder} has {size / 2**30:.1f}" for folder, size in free.items())
    raise UserError(
        f"weight files need {num_bytes / 2**30:.1f} GiB of scratch space, but {places}; raise "
        "resources.limits.memory of the role, which limits /dev/shm, or set TMPDIR in its env to a mounted volume"
    )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free if os.access(folder, os.W_OK | os.X_OK) else 0
