"""How a job runs on fewer GPUs: trainer, rollouts and the models of rewards share them, in turns. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from rljob_api.manifest.base import Spec
from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.manifest.schedule import ALTERNATING
from rljob_api.manifest.services.models import ServedModel
from rljob_inputs.memory.gpus import count_all_gpus
from rljob_inputs.memory.parts import Need
from rljob_inputs.memory.plan import Question, plan_memory
from rljob_inputs.memory.roles import GENERATE

_PLACEMENT = {"rollout.placement": "trainer"}
_SHARE = "rollout.gpuMemoryUtilization"
_SHARES = tuple(percent / 100 for percent in range(90, 15, -5))
"""Those that are tried if vLLM is what needs too much."""
_OF_OWN_PODS = ("replicas", "image", "resources", "node_pool")
"""Fields of the rollouts that mean nothing in the trainer's Pods."""
_OF_OWN_CONTAINER = ("image", "resources", "gpu_memory_utilization")
"""The same of a served model. Its fraction of a GPU was that of its own."""
_NOT_MOVED = ("env", "template")
"""Fields of the rollouts that would have to become the trainer's."""


@dataclass(frozen=True)
class Sharing:
    """How a job runs on fewer GPUs, which trainer, rollouts and served models share."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """What to set, by path within spec. Empty: it does not, for `reason`, or it does not need to."""
    removed: tuple[str, ...] = ()
    """What to remove, by path."""
    reason: str = ""
    """Why not; empty if the job's own GPUs suffice."""
    misfit: Need | None = None
    """What does not fit a shared GPU."""

    def apply(self, job: RLJob) -> RLJob:
        """Return the job with the fields set; the same one if there are none."""
        return job if not self.fields else change_job(job, self.fields, self.removed)


def share_gpus(question: Question) -> Sharing:
    """Return what placement trainer changes, of the rollouts, and if that is not enough also of served models, if the
    job needs it to run on the question's number of GPUs, and fits by the plan. A lower gpuMemoryUtilization of the
    rollouts is set, too, if that is all that it needs."""
    spec = question.spec
    if question.num_gpus is None or count_all_gpus(spec) <= question.num_gpus:
        return Sharing()
    models = _find_models(spec, question.num_gpus)
    if reason := _find_obstacle(spec, models, question.num_gpus):
        return Sharing(reason=reason)
    placement = {**_PLACEMENT, **{f"{path}.placement": "trainer" for path in models}}
    removed = tuple(_find_removed("rollout", spec.rollout, _OF_OWN_PODS))
    for path, model in models.items():
        removed += tuple(_find_removed(path, model, _OF_OWN_CONTAINER))
    try:
        changed = replace(question, job=change_job(question.job, placement, removed))
    except ValidationError as error:
        return Sharing(reason=error.errors()[0]["msg"])
    needs = _plan_shared(changed)
    is_planned = len(needs) == 2 + len(changed.job.spec.models_in_trainer)
    if not is_planned or any(need.fits is None for need in needs):
        unknown = "the memory of the GPUs" if is_planned else "the model's shape"
        return Sharing(reason=f"{unknown} is unknown, so whether both fit is, too")
    misfit = next((need for need in needs if not need.fits), None)
    if misfit is None:
        return Sharing(placement, removed)
    for share in _SHARES if misfit.peak.name == GENERATE else ():
        fields = {**placement, _SHARE: share}
        lower = replace(changed, job=change_job(question.job, fields, removed))
        if share < changed.spec.rollout_gpu_share and all(need.fits for need in _plan_shared(lower)):
            return Sharing(fields, removed)
    return Sharing(reason="all do not fit" if models else "both do not fit", misfit=misfit)


def _plan_shared(question: Question) -> list[Need]:
    """Return what the trainer's GPUs need, and those that share them."""
    return [
        need for need in plan_memory(question) if need.resource == "gpu" and (need.role == "trainer" or need.is_shared)
    ]


def _find_removed(path: str, part: Spec, names: Iterable[str]) -> Iterator[str]:
    """Yield the paths of what is set of these fields."""
    return (f"{path}.{to_camel(name)}" for name in names if name in part.model_fields_set)


def _find_models(spec: RLJobSpec, num_gpus: int) -> dict[str, ServedModel]:
    """Return the served models whose GPUs are needed for something else, even if the rollouts have none. By path within
    spec."""
    of_rollouts = 0 if spec.shares_trainer else spec.rollout.replicas * spec.rollout.gpus_per_replica
    if count_all_gpus(spec) - of_rollouts <= num_gpus:
        return {}
    return {
        path.removeprefix("spec."): model
        for path, model in spec.served_models.items()
        if model.placement == "separate" and model.gpus_per_replica
    }


def _find_obstacle(spec: RLJobSpec, models: Mapping[str, ServedModel], num_gpus: int) -> str:
    """Return why trainer, rollouts and these models cannot share GPUs, whatever their memory is; or why that would not
    be enough."""
    trainer, rollout = spec.trainer, spec.rollout
    if not spec.trains:
        return "a job that evaluates has no trainer, and all of its GPUs are in use at the same time"
    if spec.shares_trainer and not models:
        return "trainer and rollouts share their GPUs already"
    if not (trainer.gpus_per_replica and rollout.gpus_per_replica and rollout.replicas):
        return "trainer and rollouts do not both use GPUs"
    others = trainer.replicas * trainer.gpus_per_replica
    if others > num_gpus:
        whose = "the rollouts and of served models" if models else "the rollouts"
        return f"even without GPUs of {whose}, the job requests {others}"
    if spec.schedule.type not in ALTERNATING:
        return f"schedule.type {spec.schedule.type} generates while the trainer updates; set {' or '.join(ALTERNATING)}"
    if trainer.gpus_per_replica % rollout.gpus_per_replica:
        given = f"{rollout.gpus_per_replica} does not divide trainer.gpusPerReplica {trainer.gpus_per_replica}"
        return f"rollout.gpusPerReplica {given}"
    for path, model in models.items():
        if trainer.gpus_per_replica % model.gpus_per_replica:
            given = f"{model.gpus_per_replica} does not divide trainer.gpusPerReplica {trainer.gpus_per_replica}"
            return f"{path}.gpusPerReplica {given}"
    moved = next((name for name in _NOT_MOVED if getattr(rollout, name)), None)
    if moved:
        return f"rollout.{moved} is set, and the rollouts would run in the trainer's Pods; move it to trainer.{moved}"
    return ""


def change_job(job: RLJob, fields: Mapping[str, Any], removed: Collection[str] = ()) -> RLJob:
    """Return the job with these fields, and without `removed` ones, which get their defaults. Raise ValidationError if
    a rule forbids it. Paths are those within spec, such as trainer.gradientCheckpointing or rewards[0].model.dtype."""
    data = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for path in (*fields, *removed):
        *parents, leaf = path.split(".")
        section = data["spec"]
        for name, index in map(_split_index, parents):
            section = section.setdefault(name, {}) if index is None else section[name][index]
        if path in fields:
            section[leaf] = fields[path]
        else:
            section.pop(leaf, None)
    return RLJob.model_validate(data)


def _split_index(part: str) -> tuple[str, int | None]:
    """Return name and index: rewards[0] -> rewards, 0."""
    name, _, index = part.removesuffix("]").partition("[")
    return name, int(index) if index else None
