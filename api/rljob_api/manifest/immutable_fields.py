"""Which fields of an RLJob may not change, and until when: rules that compare an object with its successor.

They exist in CEL alone: only the API server sees both. They are written as those of `job_rules`.
A job that finds the checkpoints of an earlier one goes by the same tables (`read_resume_fields`).
"""

from collections.abc import Mapping, Set
from typing import Any, Final, NamedTuple

from rljob_api.manifest.base import ClusterRule, Spec, yaml_fields
from rljob_api.manifest.roles import Role
from rljob_api.manifest.schedule import MUTABLE_SCHEDULE_FIELDS
from rljob_api.wire.redaction import redact_job


def _unchanged(path: str) -> ClusterRule:
    return ClusterRule(
        path, "is immutable; create a new RLJob instead", _of_data(path, f"self.{path} == oldSelf.{path}")
    )


def _unchanged_optional(path: str) -> ClusterRule:
    kept = f"has(self.{path}) == has(oldSelf.{path}) && (!has(self.{path}) || self.{path} == oldSelf.{path})"
    return ClusterRule(path, "is immutable; create a new RLJob instead", _of_data(path, kept))


def _of_data(path: str, cel: str) -> str:
    """The rule of a field below data, which a service does not have."""
    return f"!has(self.data) || {cel}" if path.startswith("data.") else cel


def _unchanged_unless_suspended(path: str) -> ClusterRule:
    message = "is immutable while the job runs; set suspend: true first"
    return ClusterRule(path, message, f"self.{path} == oldSelf.{path} || oldSelf.suspend")


_KUEUE_MESSAGE: Final = (
    "is immutable under scheduling.gang: kueue while the job runs, because Kueue fixes the number of a group's Pods; "
    "set suspend: true first"
)
_FREE_UNDER_KUEUE: Final = "oldSelf.suspend || oldSelf.scheduling.gang != 'kueue'"
_IN_GROUP: Final = "!has(r.http) && !has(r.rewardModelRef) && !has(r.autoscaling)"
"""Whether the Pods of a reward are in Kueue's group: each Pod of an autoscaled one is queued on its own."""


def _group_sizes(spec: str) -> str:
    return f"{spec}.rewards.map(r, {_IN_GROUP}, r.replicas)"


def _agent_sizes(spec: str) -> str:
    """The replicas of what is not autoscaled."""
    user, runner, tools = (f"{spec}.agent.{part}" for part in ("user", "runner", "tools"))
    return (
        f"(has({user}) && !has({user}.autoscaling) ? [{user}.replicas] : []) + "
        # Environments have a runner in any case.
        f"[has({runner}) ? (has({runner}.autoscaling) ? 0 : {runner}.replicas) : 1] + "
        f"(has({tools}) ? {tools}.map(t, !has(t.autoscaling), t.replicas) : [])"
    )


def _keeps(model: str, has_model: str) -> str:
    """CEL: whether this model of each reward stays as it is, if it runs in the trainer's Pods."""
    placed = f"self.rewards.map(r, {has_model} && {model}.placement == 'trainer', {model})"
    return f"{placed} == {placed.replace('self.', 'oldSelf.')}"


def _list_user_model(spec: str) -> str:
    """CEL: the model of the simulated user, if it runs in the trainer's Pods, as a list."""
    user = f"{spec}.agent.user"
    has_model = f"has({user}) && has({user}.model) && has({user}.model.model)"
    model = f"{user}.model.model"
    return f"({has_model} && {model}.placement == 'trainer' ? [{model}] : [])"


_REQUIRED: Final = (
    *("task", "model", "data.mix", "data.format", "data.template", "data.chatTemplateArguments"),
    *("agent.type", "algorithm.type", "schedule.seed"),
)
_OPTIONAL: Final = ("data.train", "data.systemPrompt", "data.warmStart", "schedule.warmStart.steps", "trainer.lora")
FIXED: Final = _REQUIRED + _OPTIONAL
"""What a resume may not change: it makes another model, other prompts, or another order of prompts."""
RECORDED: Final = ("algorithm", "rewards", "rollout.sampling", "schedule")
"""What a resume may change, but for the fields of FIXED in it. Differences are printed, and recorded with the step."""
_NOT_RECORDED: Final = yaml_fields(Role).keys() | {*MUTABLE_SCHEDULE_FIELDS, "replicas", "autoscaling"}
"""What is left out: no sample and no update follows from it, or it may change without a resume."""
IMMUTABLE: Final = (
    *map(_unchanged, _REQUIRED),
    *map(_unchanged_optional, (*_OPTIONAL, "managedBy")),
    *map(_unchanged_unless_suspended, ("trainer.replicas", "trainer.gpusPerReplica", "rollout.placement")),
    ClusterRule(
        "service",
        "is immutable in whether it is set; create a new RLJob instead",
        "has(self.service) == has(oldSelf.service)",
    ),
    ClusterRule(
        "service.maxRank",
        "is immutable; create a new RLJob instead",
        "!has(self.service) || self.service.maxRank == oldSelf.service.maxRank",
    ),
    ClusterRule(
        "rewards",
        "is immutable in its models with placement trainer while the job runs; set suspend: true first",
        f"oldSelf.suspend || ({_keeps('r.model', 'has(r.model)')} && "
        f"{_keeps('r.judge.model', 'has(r.judge) && has(r.judge.model)')} && "
        f"{_keeps('r.teacher.model', 'has(r.teacher) && has(r.teacher.model)')})",
    ),
    ClusterRule(
        "agent",
        "is immutable in the model of its user with placement trainer while the job runs; set suspend: true first",
        f"oldSelf.suspend || {_list_user_model('self')} == {_list_user_model('oldSelf')}",
    ),
    ClusterRule(
        "rollout.replicas", _KUEUE_MESSAGE, f"{_FREE_UNDER_KUEUE} || self.rollout.replicas == oldSelf.rollout.replicas"
    ),
    ClusterRule(
        "rewards",
        _KUEUE_MESSAGE.replace("immutable", "immutable in its replicas (except for autoscaled rewards)"),
        f"{_FREE_UNDER_KUEUE} || {_group_sizes('self')} == {_group_sizes('oldSelf')}",
    ),
    ClusterRule(
        "agent",
        _KUEUE_MESSAGE.replace(
            "immutable", "immutable in the replicas of its user, tools and runner (except for autoscaled ones)"
        ),
        f"{_FREE_UNDER_KUEUE} || {_agent_sizes('self')} == {_agent_sizes('oldSelf')}",
    ),
)


class ResumeFields(NamedTuple):
    """What a resume compares, by path, such as spec.model, without what is missing or null."""

    fixed: dict[str, Any]
    recorded: dict[str, Any]


def read_resume_fields(spec: Spec) -> ResumeFields:
    """Return the fields without what has its default, so that another version with more fields finds the same."""
    return pick_resume_fields(spec.to_manifest(exclude_defaults=True))


def pick_resume_fields(spec: Mapping[str, Any]) -> ResumeFields:
    """Return the same of a spec as it is written in a file, without its secrets. Rewards are by name."""
    spec = redact_job(spec)
    fixed, recorded = ({f"spec.{path}": _find(spec, path.split(".")) for path in paths} for paths in (FIXED, RECORDED))
    if rewards := recorded["spec.rewards"]:
        recorded["spec.rewards"] = {each["name"]: _without(each, {"name"}) for each in rewards}
    if algorithm := recorded["spec.algorithm"]:
        recorded["spec.algorithm"] = _without(algorithm, {"type"})
    if schedule := recorded["spec.schedule"]:
        recorded["spec.schedule"] = _without(schedule, {"seed"})
    return ResumeFields(*({k: v for k, v in each.items() if v not in (None, {})} for each in (fixed, recorded)))


def _without(part: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in _NOT_RECORDED | names}


def _find(manifest: Any, location: list[str]) -> Any:
    for part in location:
        manifest = manifest.get(part) if isinstance(manifest, Mapping) else None
    return manifest
