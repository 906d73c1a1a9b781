"""Where weight files are stored between the trainer and the engines: in memory if they fit, else on disk."""

import os
import shutil
import tempfile
from pathlib import Path

from rljob_api.errors import UserError
from rljob_trainer.temporary import TemporaryFolder

_SHARED_MEMORY = Path("/dev/shm")
_MIN_SHARED_MEMORY_BYTES = 4 << 30
"""Less is for others, such as NCCL and Ray: by default, a container without a volume there has 64 MiB."""

_folders: list[TemporaryFolder] = []
"""Until this process exits."""


def open_scratch_folder(num_bytes: int) -> Path:
    """Create a private folder of this process, deleted when it exits, where `num_bytes` are free. Raise UserError if
    there is no such place."""
    _folders.append(TemporaryFolder("weights", _choose_parent(num_bytes)))
    return _folders[-1].path


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
