"""The RewardModels in a job's file, and the job with them inlined into its rewards.

On a cluster a RewardModel runs on its own. `rljob run` has one job, so the RewardModel becomes the job's own reward.
Invariant: the fields of _REWARD_FIELDS stay the reward's own; the RewardModel provides all others.
"""

from collections.abc import Iterable

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardBase, RewardModel
from rljob_api.read.documents import Document, Location, Problem
from rljob_api.read.load import read_manifest

_REWARD_FIELDS = {"name", "weight", "failurePolicy", "deadlineSeconds", "hedging", "rewardModelRef"}
Models = dict[tuple[str, str], tuple[RewardModel, Document]]
"""RewardModels and where they are written, by namespace and name."""


def read_reward_models(documents: Iterable[Document]) -> tuple[Models, list[Problem]]:
    """Return the valid RewardModels among the documents, and the problems of all documents."""
    found: Models = {}
    problems: list[Problem] = []
    for document in documents:
        manifest, invalid = read_manifest(document)
        problems += invalid
        if invalid or not isinstance(manifest, RewardModel):
            continue
        key = manifest.metadata.namespace, manifest.metadata.name
        if key in found:
            message = f"is the name of two RewardModels in this file, got {key[1]}; rename one"
            problems.append(Problem("metadata.name", document.line_of(("metadata", "name")), message))
        else:
            found[key] = manifest, document
    return found, problems


def inline_reward_models(
    job: RLJob, document: Document, models: Models
) -> tuple[RLJob, dict[int, Document], list[Problem]]:
    """Replace each reference by its RewardModel. Return also their documents by index of the reward, and what keeps
    `rljob run` from serving a reward; a cluster may have the RewardModel."""
    rewards, sources, problems = [], {}, []
    for index, reward in enumerate(job.spec.rewards):
        reference = reward.reward_model_ref
        found = models.get((job.metadata.namespace, reference.name)) if reference else None
        if found is not None:
            model, sources[index] = found
            if model.spec.is_served and model.spec.replicas == 0 and model.spec.autoscaling is None:
                line = sources[index].line_of(("spec", "replicas"))
                problems.append(Problem("spec.replicas", line, "must be at least 1 for `rljob run`, got 0; raise it"))
            # Fields of all Pods of a RewardModel have no meaning in `rljob run`.
            fields = {name: getattr(model.spec, name) for name in RewardBase.model_fields}
            reward = reward.model_copy(update=fields | {"reward_model_ref": None})
        elif reference:
            line = document.line_of(("spec", "rewards", index, "rewardModelRef", "name"))
            path = f"spec.rewards[{index}].rewardModelRef.name"
            problems.append(Problem(path, line, _describe_missing(reference.name, job, models)))
        rewards.append(reward)
    return job.with_spec(rewards=rewards), sources, problems


def locate(location: Location, document: Document, sources: dict[int, Document]) -> tuple[Location, Document]:
    """Return where a field of the job is written: in the job's own document, or in that of a RewardModel."""
    if len(location) < 4 or location[:2] != ("spec", "rewards") or location[3] in _REWARD_FIELDS:
        return location, document
    index = location[2]
    source = sources.get(index) if isinstance(index, int) else None
    return (("spec", *location[3:]), source) if source else (location, document)


def _describe_missing(name: str, job: RLJob, models: Models) -> str:
    elsewhere = [namespace for namespace, other in models if other == name]
    if elsewhere:
        where = f"the job's namespace {job.metadata.namespace}, got one in {elsewhere[0]}"
        return f"must be a RewardModel in {where}; give both the same metadata.namespace"
    names = ", ".join(sorted(model for _, model in models))
    others = f" (it has {names})" if names else ""
    remedy = "add it as another document (kind: RewardModel, after ---)"
    return f"must be a RewardModel in this file, got {name}{others}; {remedy}"
