"""The doctor's command line. With $RLJOB_JOB_FILE, as in a job's Pod, it asks for what the job asks for.

What the node and the container runtime give the Pod: memory for files, folders, limits and RDMA devices.
"""

import argparse
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob_api.read.pod_files import load_job_file
from rljob_api.wire.contract import ENV_JOB_FILE, ENV_RUN_DIR
from rljob_trainer.doctor.compute import check_compute
from rljob_trainer.doctor.report import Check, format_json, format_table, has_failed

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


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    num_gpus, field = options.gpus, "--gpus"
    if num_gpus is None and (path := os.environ.get(ENV_JOB_FILE)):
        spec = load_job_file(path).spec
        num_gpus = (spec.trainer if options.role == "trainer" else spec.rollout).gpus_per_replica
        field = f"spec.{options.role}.gpusPerReplica"
    checks = [*check_compute(num_gpus, field, options.ranks), *check_machine()]
    print(format_json(checks) if options.output == "json" else format_table(checks), flush=True)
    return int(has_failed(checks))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rljob_trainer.doctor",
        description="Check what trainers and rollouts need of a node and an image. Exits with 1 if a check fails.",
    )
    parser.add_argument("--gpus", type=int, help="GPUs that the Pod was asked for; default: as the job, or all it sees")
    parser.add_argument("--role", choices=("trainer", "rollout"), default="trainer", help="whose GPUs, in a job's Pod")
    parser.add_argument("--ranks", type=int, help="processes of the all-reduce; default: one per GPU")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    return parser.parse_args(arguments)
