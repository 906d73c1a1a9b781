"""The rules of what shares the trainer's devices: rollouts and served models with placement trainer.

`job_rules` lists them among its own. Each exists twice, in Python and in CEL.
"""

from collections.abc import Callable
from typing import Final

from rljob_api.manifest.base import Rule
from rljob_api.manifest.job_spec import JobSpec
from rljob_api.manifest.roles import SHARED_GPU as ROLLOUT_GPU
from rljob_api.manifest.roles import NodePool, Resources, RolloutRole
from rljob_api.manifest.schedule import ALTERNATING
from rljob_api.manifest.services.models import SHARED_GPU

SEPARATE: Final = "self.rollout.placement == 'separate'"
"""CEL: whether the rollouts have Pods of their own."""
_MIN_SHARE: Final = round(1 - ROLLOUT_GPU + 0.01, 2)
"""Null of the rollouts, with the remainder of the ranks."""
_MODEL_SHARE: Final = f"has(m.gpuMemoryUtilization) ? m.gpuMemoryUtilization : {SHARED_GPU}"


def _divides_trainer(spec: JobSpec) -> bool:
    return _divides(spec.trainer.gpus_per_replica, spec.rollout.gpus_per_replica)


def _divides(trainer: int, engine: int) -> bool:
    return trainer > 0 and trainer % engine == 0 if engine else trainer == 0


def _leave_out(field: str, is_left_out: Callable[[RolloutRole], bool], cel: str) -> Rule:
    """The rule that a field of the rollouts' Pods is left out if they have no Pods. `cel` is over the rollouts."""
    return Rule(
        (f"rollout.{field}", "rollout.placement"),
        "must be left out with rollout.placement trainer: the rollouts run in the trainer's Pods",
        f"set trainer.{field}, or remove rollout.placement",
        lambda spec: not spec.shares_trainer or is_left_out(spec.rollout),
        f"{SEPARATE} || ({cel})",
    )


def _find_misplaced(spec: JobSpec) -> str:
    return ", ".join(f"{path}.placement" for path in spec.models_in_trainer)


def _models_divide_trainer(spec: JobSpec) -> bool:
    gpus = {model.gpus_per_replica for model in spec.models_in_trainer.values()}
    return all(_divides(spec.trainer.gpus_per_replica, each) for each in gpus)


def _shares_fit(spec: JobSpec) -> bool:
    share = spec.rollout.gpu_memory_utilization or _MIN_SHARE
    return not (spec.trainer.gpus_per_replica and spec.shares_trainer) or share + spec.models_gpu_share <= 1


def _map_shared(value: str) -> str:
    """CEL: `value` of each served model m with placement trainer, as one list."""
    judge, user = "r.judge.model", "self.agent.user.model.model"
    has_judge, has_user = "has(r.judge) && has(r.judge.model)", "has(self.agent.user) && has(self.agent.user.model)"
    return (
        f"self.rewards.map(r, has(r.model) && r.model.placement == 'trainer', {value.replace('m.', 'r.model.')}) + "
        f"self.rewards.map(r, {has_judge} && {judge}.placement == 'trainer', {value.replace('m.', f'{judge}.')}) + "
        f"({has_user} && has({user}) && {user}.placement == 'trainer' ? [{value.replace('m.', f'{user}.')}] : [])"
    )


SHARED_DEVICES: Final = (
    Rule(
        ("schedule.type", "rollout.placement"),
        f"must be {' or '.join(ALTERNATING)} with rollout.placement trainer: rollouts and trainer alternate",
        "set schedule.type, or remove rollout.placement",
        lambda spec: not spec.shares_trainer or spec.schedule.type in ALTERNATING,
        f"{SEPARATE} || self.schedule.type in {list(ALTERNATING)}",
    ),
    Rule(
        ("rollout.replicas", "rollout.placement"),
        "must be 1 (its default) with rollout.placement trainer: their number follows from the trainer's Pods and GPUs",
        "remove it, and set trainer.replicas, or remove rollout.placement",
        lambda spec: not spec.shares_trainer or spec.rollout.replicas == 1,
        f"{SEPARATE} || self.rollout.replicas == 1",
    ),
    Rule(
        ("rollout.weightTransfer", "rollout.placement"),
        "must be auto or file unless rollout.placement is trainer: other rollouts share no devices with it",
        "remove it, or set rollout.placement: trainer",
        lambda spec: spec.shares_trainer or spec.rollout.weight_transfer != "device",
        f"!({SEPARATE}) || self.rollout.weightTransfer != 'device'",
    ),
    Rule(
        ("rollout.gpusPerReplica", "trainer.gpusPerReplica", "rollout.placement"),
        "must be a divisor of trainer.gpusPerReplica with rollout.placement trainer, or 0 if that is 0",
        "change either, or remove rollout.placement",
        lambda spec: not spec.shares_trainer or _divides_trainer(spec),
        f"{SEPARATE} || (self.rollout.gpusPerReplica == 0 ? self.trainer.gpusPerReplica == 0 : "
        "self.trainer.gpusPerReplica > 0 && self.trainer.gpusPerReplica % self.rollout.gpusPerReplica == 0)",
    ),
    Rule(
        ("rewards", "agent.user", "rollout.placement"),
        "must have no model with placement trainer unless rollout.placement is trainer, too",
        "set rollout.placement: trainer, or remove the model's placement",
        lambda spec: spec.shares_trainer or not spec.models_in_trainer,
        f"!({SEPARATE}) || ({_map_shared('true')}).size() == 0",
        _find_misplaced,
    ),
    Rule(
        ("rewards", "agent.user", "trainer.gpusPerReplica"),
        "must have a divisor of trainer.gpusPerReplica as gpusPerReplica of each model with placement trainer, or 0 if "
        "that is 0",
        "change either, or remove the model's placement",
        _models_divide_trainer,
        f"({_map_shared('m.gpusPerReplica')}).all(gpus, gpus == 0 ? self.trainer.gpusPerReplica == 0 : "
        "self.trainer.gpusPerReplica > 0 && self.trainer.gpusPerReplica % gpus == 0)",
    ),
    Rule(
        ("rollout.gpuMemoryUtilization", "rewards", "agent.user"),
        "plus that of all models with placement trainer must be at most 1: they are awake at the same time",
        "lower either; null is 0.8 less that of the models",
        _shares_fit,
        f"self.trainer.gpusPerReplica == 0 || {SEPARATE} || ([has(self.rollout.gpuMemoryUtilization) ? "
        f"self.rollout.gpuMemoryUtilization : {_MIN_SHARE}] + {_map_shared(_MODEL_SHARE)}).sum() <= 1.0",
    ),
    _leave_out("image", lambda rollout: rollout.image is None, "!has(self.rollout.image)"),
    _leave_out(
        "resources",
        lambda rollout: rollout.resources == Resources(),
        "self.rollout.resources.requests.size() == 0 && self.rollout.resources.limits.size() == 0",
    ),
    _leave_out(
        "nodePool",
        lambda rollout: rollout.node_pool == NodePool(),
        "self.rollout.nodePool.nodeSelector.size() == 0 && self.rollout.nodePool.tolerations.size() == 0 && "
        f"!self.rollout.nodePool.exclusive && self.rollout.nodePool.gpuResource == '{NodePool().gpu_resource}' && "
        "!has(self.rollout.nodePool.topology)",
    ),
    _leave_out("env", lambda rollout: not rollout.env, "self.rollout.env.size() == 0"),
)
