"""Whether the disk of the head's node must hold large checkpoints, because the job has no claim."""

from collections.abc import Iterator, Mapping

from rljob_api.manifest.job import RLJob
from rljob_cli.check.jobfile import Finding

_GIB = 2**30
_LARGE_BYTES = 20 * _GIB
"""Nodes often have 100 GB for images, logs and the files of all Pods."""
_STORAGE = "ephemeral-storage"


def check_head_disk(job: RLJob, num_parameters: Mapping[str, int]) -> Iterator[Finding]:
    """Warn about large checkpoints without a claim, unless the head requests the disk for them."""
    checkpoint, requested = job.spec.checkpoint, job.spec.head.resources.requests
    checkpoint_bytes = job.spec.checkpoint_bytes(num_parameters.get("spec.model.source", 0))
    needed = checkpoint_bytes * (job.spec.num_kept_checkpoints + 1)
    if checkpoint.persistent_volume_claim is not None or _STORAGE in requested or needed < _LARGE_BYTES:
        return
    problem = f"is not set, so the node of the head needs {needed / _GIB:.0f} GiB of disk for checkpoints"
    remedy = f"set a claim, or head.resources.requests.{_STORAGE}"
    yield Finding("spec.checkpoint.persistentVolumeClaim", f"{problem}; {remedy}", is_warning=True, only="cluster")
