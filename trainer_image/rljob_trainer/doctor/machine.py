"""What the node and the container runtime give the Pod: memory for files, folders, limits and RDMA devices."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob_api.wire.contract import ENV_RUN_DIR
from rljob_trainer.doctor.report import Check

_GIB = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")
_MIN_SHARED_MEMORY_BYTES = _GIB
"""Ray's objects, NCCL's buffers between GPUs of a node, and vLLM's messages between its processes."""
_INFINIBAND = Path("/dev/infiniband")
_MIN_OPEN_FILES = 65_536
"""The head raises its soft limit to this. Each request in flight is a connection."""


def check_machine() -> Iterator[Check]:
    yield check_shared_memory(_SHARED_MEMORY)
    for folder in _find_folders():
        yield check_folder(folder)
    devices = sorted(path.name for path in _INFINIBAND.glob("uverbs*"))
    yield check_rdma(devices, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def check_shared_memory(path: Path) -> Check:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Check(f"memory of {path}", "failed", str(error), f"mount an emptyDir with medium Memory at {path}")
    found = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if usage.total < _MIN_SHARED_MEMORY_BYTES:
        remedy = f"mount an emptyDir with medium Memory at {path}, as RLJob's Pods do; Kubernetes gives 64 MiB"
        return Check(f"memory of {path}", "failed", found, remedy)
    return Check(f"memory of {path}", "ok", found)


def _find_folders() -> Sequence[Path]:
    """The folders that the programs write to."""
    found = [Path.home(), Path(tempfile.gettempdir())]
    if run := os.environ.get(ENV_RUN_DIR):
        found.append(Path(run))
    return list(dict.fromkeys(found))


def check_folder(folder: Path) -> Check:
    name = f"folder {folder}"
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        return Check(name, "ok", f"writable, {shutil.disk_usage(folder).free / _GIB:.1f} GiB free")
    except OSError as error:
        remedy = f"user {os.getuid()} must be able to write it: fsGroup or another volume; HOME may be any such folder"
        return Check(name, "failed", str(error), remedy)


def check_rdma(devices: Sequence[str], memlock: int) -> Check:
    """`memlock`: the limit of locked memory in bytes, which RDMA needs for its buffers; -1: none."""
    if not devices:
        return Check("RDMA", "ok", "no devices in /dev/infiniband: NCCL uses TCP between nodes")
    found = f"{', '.join(devices)}; locked memory: {'unlimited' if memlock < 0 else f'{memlock} bytes'}"
    if memlock < 0:
        return Check("RDMA", "ok", found)
    remedy = "add the capability IPC_LOCK to the container's securityContext, or raise the runtime's limit of memlock"
    return Check("RDMA", "warning", found, remedy)


def check_open_files(limit: int) -> Check:
    found = "unlimited" if limit < 0 else str(limit)
    if 0 <= limit < _MIN_OPEN_FILES:
        remedy = f"raise the runtime's hard limit of open files to {_MIN_OPEN_FILES}: each request is a connection"
        return Check("open files", "warning", found, remedy)
    return Check("open files", "ok", found)
