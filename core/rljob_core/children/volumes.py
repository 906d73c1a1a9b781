"""The volumes of Pods: the job file, the run folder, claims, shared memory, and what replaces a writable root.

Invariant: no program can write to a pvc:// source.
"""

from dataclasses import dataclass

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.sources import parse_source
from rljob_api.wire import contract
from rljob_core.backend import Manifest
from rljob_core.children import common
from rljob_core.defaults import Defaults


@dataclass(frozen=True)
class Volume:
    """A volume and the path where the main container mounts it."""

    name: str
    source: Manifest
    path: str
    read_only: bool = False
    sub_path: str = ""

    def build_mount(self) -> Manifest:
        options = ({"readOnly": True} if self.read_only else {}) | ({"subPath": self.sub_path} if self.sub_path else {})
        return {"name": self.name, "mountPath": self.path} | options


def build_job_volumes(job: RLJob, defaults: Defaults, sources: list[str], *, run_dir: bool) -> list[Volume]:
    """The volumes of the trainer image's containers: the job file, the run folder, shared memory, /tmp, and claims."""
    # The kubelet refreshes the file, so increased steps reach the driver.
    config = {"configMap": {"name": common.child_name(job, "config")}}
    run = _build_run_volume(job) if run_dir else None
    return [
        Volume("config", config, contract.PATH_CONFIG, read_only=True),
        *([run] if run else []),
        build_shm_volume(),
        *build_home_volumes(defaults),
        *build_claim_volumes(sources, run),
    ]


def _build_run_volume(job: RLJob) -> Volume:
    """Checkpoints and metrics: a folder with the job's name in the user's claim, else deleted with the Pod."""
    claim = job.spec.checkpoint.persistent_volume_claim
    if claim is None:
        return Volume("run", {"emptyDir": {}}, contract.PATH_RUN)
    source = {"persistentVolumeClaim": {"claimName": claim.claim_name}}
    return Volume("run", source, contract.PATH_RUN, sub_path=job.metadata.name)


def build_shm_volume() -> Volume:
    """Ray's object store and NCCL need more shared memory than the default of 64 MiB."""
    return Volume("shm", {"emptyDir": {"medium": "Memory"}}, "/dev/shm")


def build_home_volumes(defaults: Defaults, name: str = "tmp") -> list[Volume]:
    """What a container with a read-only root writes to besides its other volumes. /tmp is HOME in the trainer image:
    caches of the Hub, vLLM, torch and triton, and the files of Ray are there."""
    return [Volume(name, {"emptyDir": {}}, "/tmp")] if defaults.read_only_root_filesystem else []


def build_claim_volumes(sources: list[str], run_volume: Volume | None = None) -> list[Volume]:
    """The claims of pvc:// sources. The claim of `run_volume` is mounted a second time from that volume: two volumes of
    the same claim are one mount for the kubelet, and the read-only one may win.

    Volume names are numbered because claim names may be longer. Volumes are read-only, not only their mounts, so that
    fsGroup never changes the owner of the user's data."""
    claims = sorted({parsed.claim for parsed in map(parse_source, sources) if parsed.kind == "pvc"})
    shared = (run_volume.source.get("persistentVolumeClaim") or {}).get("claimName") if run_volume else None
    volumes = []
    for index, claim in enumerate(claims):
        path = f"{contract.PATH_CLAIMS}/{claim}"
        if run_volume and claim == shared:
            volumes.append(Volume(run_volume.name, run_volume.source, path, read_only=True))
        else:
            source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
            volumes.append(Volume(f"claim-{index}", source, path, read_only=True))
    return volumes
