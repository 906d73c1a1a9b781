"""From a job that trains to the jobs that evaluate models: as changes of fields, so that each is read and checked like
any other file. Pure.
"""

import json
from collections.abc import Iterator
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_cli.evaluate.models import Candidate

_SHARED_FIELDS = ("image", "resources", "nodePool", "env", "template")
"""Fields of the rollouts' Pods that are the trainer's with rollout.placement trainer."""


def list_overrides(job: RLJob, candidate: Candidate, name: str, source: str) -> list[str]:
    """Return what to set in the job's file to evaluate one model. `source`: where the model is, for spec.model."""
    changes: dict[str, Any] = {"metadata.name": name, "spec.task": "evaluate"}
    if not candidate.is_own:
        changes |= {"spec.model.source": source, "spec.model.revision": candidate.revision}
    changes |= dict(_separate(job))
    return [f"{path}={json.dumps(value)}" for path, value in changes.items()]


def _separate(job: RLJob) -> Iterator[tuple[str, Any]]:
    """Yield the fields by which engines in the trainer's Pods get Pods of their own."""
    spec = job.spec
    for path in spec.models_in_trainer:
        yield f"{path}.placement", "separate"
    if spec.shares_trainer:
        yield "spec.rollout.placement", "separate"
        yield "spec.rollout.weightTransfer", "file"
        yield "spec.rollout.replicas", spec.num_rollout_replicas
        trainer = spec.trainer.to_manifest(exclude_defaults=True)
        yield from ((f"spec.rollout.{field}", trainer[field]) for field in _SHARED_FIELDS if field in trainer)
