"""Objects that pydantic refuses: what is wrong with them, and a status that says so. Pure.

Invariant: of such an object only the metadata and, if it can be read, the old status are used; what runs stays.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.manifest.base import ObjectMeta, Spec
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardModel, RewardModelStatus
from rljob_api.manifest.status import Condition, RLJobStatus
from rljob_api.read.documents import format_path
from rljob_api.read.validation_messages import describe_error
from rljob_operator.backend import Event, Manifest
from rljob_operator.plan.conditions import MAX_MESSAGE_LENGTH, REASON_INVALID_SPEC
from rljob_operator.plan.reward_model import READY

_REMEDY = "the cluster's CRDs take it: upgrade the operator to their version, or change it"


class InvalidRewardModelError(UserError):
    """For a RewardModel what InvalidJobError is for a job."""

    def __init__(self, model: RewardModel, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.model, self.problems = model, problems


def find_problems(model: type[Spec], error: ValidationError) -> list[str]:
    """What is wrong, each with its path. The CRDs have taken it, so they are of another version than the operator."""
    problems = [
        f"{format_path(detail['loc'])} {_describe(model, detail)}".strip() for detail in error.errors(include_url=False)
    ]
    return [f"{problem}; {_REMEDY}" for problem in problems]


def _describe(model: type[Spec], detail: Any) -> str:
    if detail["type"] == "extra_forbidden":
        return "is unknown to this operator"
    if detail["type"] == "value_error":  # one of our own rules
        return str(detail["ctx"]["error"])
    return describe_error(model, detail["type"], detail["loc"], detail["input"], detail.get("ctx", {}))


def build_unreadable_job(manifest: Manifest) -> RLJob:
    """A job with its metadata and, if it can be read, its status; and a spec that nobody may look at."""
    fields: dict[str, Any] = {"metadata": ObjectMeta.model_validate(manifest["metadata"])}
    job = RLJob.model_construct(**fields)
    try:
        job.status = RLJobStatus.model_validate(manifest.get("status") or {})
    except ValidationError:
        job.status = RLJobStatus()
    return job


def build_unreadable_model(manifest: Manifest) -> RewardModel:
    fields: dict[str, Any] = {"metadata": ObjectMeta.model_validate(manifest["metadata"])}
    model = RewardModel.model_construct(**fields)
    try:
        model.status = RewardModelStatus.model_validate(manifest.get("status") or {})
    except ValidationError:
        model.status = RewardModelStatus()
    return model


def build_invalid_model_status(error: InvalidRewardModelError, now: datetime) -> tuple[RewardModelStatus, list[Event]]:
    """What to store and to tell of a model whose spec nobody can read."""
    old, generation = error.model.status, error.model.metadata.generation
    before = next((c for c in old.conditions if c.type == READY), None)
    unchanged = before is not None and before.status == "False"
    ready = Condition(
        type=READY,
        status="False",
        reason=REASON_INVALID_SPEC,
        message=str(error)[:MAX_MESSAGE_LENGTH],
        last_transition_time=before.last_transition_time if before and unchanged else now.replace(microsecond=0),
        observed_generation=generation,
    )
    others = [c for c in old.conditions if c.type != READY]
    status = old.model_copy(update={"conditions": [ready, *others], "observed_generation": generation})
    is_news = before is None or (before.reason, before.message) != (ready.reason, ready.message)
    return status, [Event("Warning", ready.reason, ready.message)] if is_news else []
