"""The vLLM engines in each trainer Pod, with rollout.placement trainer: rollouts, and served models that share. Pure.

Invariant: the same spec gives them the same numbers for all readers. An engine listens at PORT_ROLLOUT + its number.
"""

from typing import NamedTuple

from rljob_api.manifest.job import RLJobSpec
from rljob_api.wire.contract import PORT_ROLLOUT


class PodEngine(NamedTuple):
    number: int
    model: str
    """Path of the served model, such as spec.rewards[0].model; empty for a rollout."""
    gpus: range
    """Those of the Pod's GPUs that it uses; empty without GPUs."""
    startup_seconds: int
    """For it to get warm."""


def find_engines(spec: RLJobSpec) -> list[PodEngine]:
    """Return those of one Pod: rollouts first. Each kind uses all of its GPUs; without GPUs it has one engine."""
    rollouts = ("", spec.rollout.gpus_per_replica, spec.rollout_startup_seconds)
    models = [(path, each.gpus_per_replica, each.startup_seconds) for path, each in spec.models_in_trainer.items()]
    engines: list[PodEngine] = []
    for path, num_gpus, seconds in [rollouts, *models] if spec.shares_trainer else []:
        for index in range(spec.count_per_pod(num_gpus)):
            gpus = range(index * num_gpus, (index + 1) * num_gpus)
            engines.append(PodEngine(len(engines), path, gpus, seconds))
    return engines


def find_ports(spec: RLJobSpec, model: str) -> list[int]:
    """Return the ports of a served model's engines in each trainer Pod."""
    return [PORT_ROLLOUT + engine.number for engine in find_engines(spec) if engine.model == model]
