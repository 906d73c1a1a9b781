"""Which generation of a spec runs, although a later one was refused. Pure.

It is the observedGeneration of the condition Running of a job, and of Ready of a RewardModel, while it is True.
"""

from typing import TypeVar

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModelStatus
from rljob_api.manifest.status import RLJobStatus
from rljob_core.backend import Owner
from rljob_core.plan import conditions

_Status = TypeVar("_Status", RLJobStatus, RewardModelStatus, RLJobStatus | RewardModelStatus)


def working_type(owner: Owner) -> str:
    """The type of the condition that is True while Pods work."""
    return conditions.RUNNING if isinstance(owner, RLJob) else conditions.READY


def find_running_generation(owner: Owner) -> int:
    """Return the generation whose Pods work; 0 if none do."""
    condition = conditions.find(owner.status, working_type(owner))
    return condition.observed_generation if condition and condition.status == "True" else 0


def keep_running_generation(owner: Owner, status: _Status) -> _Status:
    """Return `status` with the generation that runs instead of the one that was refused."""
    running, type_ = find_running_generation(owner), working_type(owner)
    kept = [
        c.model_copy(update={"observed_generation": running}) if running and c.type == type_ else c
        for c in status.conditions
    ]
    return status.model_copy(update={"conditions": kept})


def describe_refused_change(owner: Owner, message: str) -> str:
    """Return the message with the generation that it is about and the one that runs, if they differ."""
    running, generation = find_running_generation(owner), owner.metadata.generation
    if running in (0, generation):
        return message
    return f"generation {generation} is not applied: {message}; generation {running} stays"
