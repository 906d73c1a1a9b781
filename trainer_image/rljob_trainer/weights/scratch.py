"""Where weight files lie between the trainer and the engines: memory where it is roomy, else the Pod's scratch disk.

A folder belongs to one process and goes when it ends; one left by a killed process is removed by the next that
looks. Nothing here outlives a run on purpose.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from rljob_api.wire.contract import PATH_SCRATCH

_PREFIX = "rljob-weights-"
_SHARED_MEMORY = Path("/dev/shm")
# Kubernetes gives a container 64 MiB of /dev/shm unless the Pod mounts more.
_ROOMY_BYTES = 4 << 30


def open_scratch_folder() -> Path:
    """A fresh private folder of this process, removed when it exits."""
    parent = next(filter(_is_usable, (_SHARED_MEMORY, Path(PATH_SCRATCH))), Path(tempfile.gettempdir()))
    _remove_leftovers(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
    owner = os.getpid()
    # A forked child runs this too when it exits; only the owner may remove the folder.
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def _is_usable(parent: Path) -> bool:
    if not os.access(parent, os.W_OK | os.X_OK):
        return False
    return parent != _SHARED_MEMORY or shutil.disk_usage(parent).free >= _ROOMY_BYTES


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not _is_running(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
