"""The children of a job and the problems of its spec, and a memory that builds them once for equal inputs.

A job that starts or trains is reconciled every few seconds, and its spec seldom changes; building and checking took
half of a reconcile's CPU time. Invariant: builders get only what is in the key, so equal keys mean equal children.
"""

import hashlib
import zlib
from collections.abc import Callable, Mapping

import msgspec

from rljob_api.errors import UserError
from rljob_api.manifest.base import ObjectMeta
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.manifest.status import RLJobStatus
from rljob_core.backend import Manifest
from rljob_core.children import build_children
from rljob_core.defaults import Defaults
from rljob_core.plan.validate import find_child_problems, find_spec_problems

MAX_BYTES = 32 * 2**20
"""All packed results: 3 KB for a job without long functions."""

Built = tuple[list[Manifest], list[str]]
"""All children, and the problems of a spec for which they cannot be built."""
Build = Callable[[RLJob, str, Defaults, Mapping[str, RewardModel]], Built]
"""Gets the job with its decided replicas, the token of its Pods, and the RewardModels that it references."""


class BuiltChildren:
    """Remembers what was built last, compressed: as objects, the children of a thousand jobs would take 100 MB."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._packed: dict[bytes, bytes] = {}
        """By digest of the inputs; what was used last comes last."""

    def build(self, job: RLJob, token: str, defaults: Defaults, models: Mapping[str, RewardModel]) -> Built:
        """Return new objects, which the caller may keep."""
        job, models = _reduce_job(job), _reduce_models(job, models)
        digest = hashlib.sha256(token.encode())
        for part in (defaults, job, *models.values()):
            # What is not set has its default. Only what is set tells a value from the same default.
            digest.update(b"\0" + part.model_dump_json(exclude_unset=True).encode())
        key = digest.digest()
        packed = self._packed.pop(key, None)
        if packed is None:
            built = build_checked(job, token, defaults, models)
            packed = zlib.compress(msgspec.json.encode(built), zlib.Z_BEST_SPEED)
            self.num_bytes += len(packed)
        self._packed[key] = packed
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._packed.pop(next(iter(self._packed))))
        children, problems = msgspec.json.decode(zlib.decompress(packed))
        return children, problems


def build_checked(job: RLJob, token: str, defaults: Defaults, models: Mapping[str, RewardModel]) -> Built:
    """Build and check the children now."""
    if problems := find_spec_problems(job):
        return [], problems
    try:
        children = build_children(job, token, defaults, models)
    except UserError as error:
        return [], [str(error)]
    return children, find_child_problems(job, children)


def _reduce_job(job: RLJob) -> RLJob:
    """The job with what its children depend on."""
    meta = job.metadata
    metadata = ObjectMeta(name=meta.name, namespace=meta.namespace, uid=meta.uid, annotations=meta.annotations)
    status = RLJobStatus(avoided_nodes=job.status.avoided_nodes, start_model=job.status.start_model)
    return job.model_copy(update={"metadata": metadata, "status": status})


def _reduce_models(job: RLJob, models: Mapping[str, RewardModel]) -> dict[str, RewardModel]:
    names = {reward.reward_model_ref.name for reward in job.spec.rewards if reward.reward_model_ref}
    reduced = {}
    for name in sorted(names & models.keys()):
        model = models[name]
        metadata = ObjectMeta(name=model.metadata.name, namespace=model.metadata.namespace, uid=model.metadata.uid)
        reduced[name] = RewardModel(metadata=metadata, spec=model.spec)
    return reduced
