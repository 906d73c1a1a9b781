"""RLJob: the job that a user writes. Only model is required, and data and rewards, or service."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from rljob_api.manifest.base import ClusterRule, ObjectMeta, Rule, Spec
from rljob_api.manifest.immutable_fields import IMMUTABLE
from rljob_api.manifest.job_rules import RULES
from rljob_api.manifest.job_spec import JobSpec
from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.contract import API_VERSION


class RLJobSpec(JobSpec):
    """Desired state of an RLJob."""

    RULES: ClassVar[tuple[Rule, ...]] = RULES
    CLUSTER_RULES: ClassVar[tuple[ClusterRule, ...]] = IMMUTABLE


class RLJob(Spec):
    """One reinforcement-learning post-training job."""

    api_version: Literal["rljob.dev/v1alpha1"] = API_VERSION
    kind: Literal["RLJob"] = "RLJob"
    metadata: ObjectMeta
    spec: RLJobSpec
    status: RLJobStatus = RLJobStatus()

    def with_spec(self, **fields: Any) -> RLJob:
        """Return a copy with these fields of `spec`, by their names in Python. Nothing is checked."""
        return self.model_copy(update={"spec": self.spec.model_copy(update=fields)})

    @property
    def copy_url(self) -> str | None:
        """Where spec.checkpoint.storage has the files of this run."""
        prefix = self.spec.checkpoint.storage
        return None if prefix is None else f"{prefix.rstrip('/')}/{self.metadata.name}"
