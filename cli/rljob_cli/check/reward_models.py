"""The RewardModels in a job's file, and the job with them inlined into its rewards.

On a cluster a RewardModel runs on its own. `rljob run` has one job, so the RewardModel becomes the job's own reward.
Invariant: the reward's own fields (name, weight, failurePolicy, deadlineSeconds, hedging) stay; the RewardModel
provides all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward, RewardModel
from rljob_api.read.documents import Document, Location, Problem
from rljob_api.read.load import read_manifest

_REWARD_FIELDS = {"name", "weight", "failurePolicy", "deadlineSeconds", "hedging", "rewardModelRef"}
_REMEDY = "add it as another document (kind: RewardModel, after ---)"


@dataclass(frozen=True)
class RewardModelDocument:
    model: RewardModel
    document: Document

    @property
    def name(self) -> str:
        return self.model.metadata.name

    @property
    def key(self) -> tuple[str, str]:
        return self.model.metadata.namespace, self.name


def read_reward_models(documents: Iterable[Document]) -> tuple[list[RewardModelDocument], list[Problem]]:
    """Return the valid RewardModels among the documents, and the problems of all documents."""
    found: dict[tuple[str, str], RewardModelDocument] = {}
    problems: list[Problem] = []
    for document in documents:
        manifest, invalid = read_manifest(document)
        problems += invalid
        if invalid or not isinstance(manifest, RewardModel):
            continue
        model = RewardModelDocument(manifest, document)
        if model.key in found:
            message = f"is the name of two RewardModels in this file, got {model.name}; rename one"
            problems.append(Problem("metadata.name", document.line_of(("metadata", "name")), message))
        else:
            found[model.key] = model
    return list(found.values()), problems


def inline_reward_models(
    job: RLJob, document: Document, models: list[RewardModelDocument]
) -> tuple[RLJob, dict[int, Document], list[Problem]]:
    """Replace each reference by its RewardModel.

    Return the job, the RewardModels' documents by index of the reward, and the problems of the references."""
    by_key = {model.key: model for model in models}
    rewards, sources, problems = [], {}, []
    for index, reward in enumerate(job.spec.rewards):
        reference = reward.reward_model_ref
        found = by_key.get((job.metadata.namespace, reference.name)) if reference else None
        if reference and found is None:
            location: Location = ("spec", "rewards", index, "rewardModelRef", "name")
            message = _describe_missing(reference.name, job, models)
            path = f"spec.rewards[{index}].rewardModelRef.name"
            problems.append(Problem(path, document.line_of(location), message))
        if found is None:
            rewards.append(reward)
            continue
        spec = found.model.spec
        if spec.is_served and spec.replicas == 0 and spec.autoscaling is None:
            line = found.document.line_of(("spec", "replicas"))
            problems.append(Problem("spec.replicas", line, "must be at least 1 for `rljob run`, got 0; raise it"))
        rewards.append(_merge(reward, found.model))
        sources[index] = found.document
    return job.model_copy(update={"spec": job.spec.model_copy(update={"rewards": rewards})}), sources, problems


def locate(location: Location, document: Document, sources: dict[int, Document]) -> tuple[Location, Document]:
    """Return where a field of the job is written: in the job's own document, or in that of a RewardModel."""
    if len(location) < 4 or location[:2] != ("spec", "rewards") or location[3] in _REWARD_FIELDS:
        return location, document
    index = location[2]
    source = sources.get(index) if isinstance(index, int) else None
    return (("spec", *location[3:]), source) if source else (location, document)


def _merge(reward: Reward, model: RewardModel) -> Reward:
    fields = {name: getattr(model.spec, name) for name in type(model.spec).model_fields}
    return reward.model_copy(update=fields | {"reward_model_ref": None})


def _describe_missing(name: str, job: RLJob, models: list[RewardModelDocument]) -> str:
    elsewhere = [model.model.metadata.namespace for model in models if model.name == name]
    if elsewhere:
        return (
            f"must be a RewardModel in the job's namespace {job.metadata.namespace}, got one in {elsewhere[0]}; "
            "give both the same metadata.namespace"
        )
    names = ", ".join(sorted(model.name for model in models))
    others = f" (it has {names})" if names else ""
    return f"must be a RewardModel in this file, got {name}{others}; {_REMEDY}"
