"""The RewardModels beside a job in its file, and the job as it is with them written into its rewards.

On a cluster a RewardModel runs by itself; `rljob run` has one job, whose own reward it becomes. Leaves reading the job
to jobfile. Invariant: what a reward says of itself (name, weight, failurePolicy, deadlineSeconds, hedging) stays; all
else is the model's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward, RewardModel
from rljob_api.read.documents import Document, Location
from rljob_api.read.load import InvalidManifestError, Problem, load_manifests

_OF_THE_REWARD = {"name", "weight", "failurePolicy", "deadlineSeconds", "hedging", "rewardModelRef"}
_REMEDY = "add it as a document of its own (kind: RewardModel, after ---)"


@dataclass(frozen=True)
class Neighbour:
    """A RewardModel and where it was written."""

    model: RewardModel
    document: Document


class _QuotingDumper(yaml.SafeDumper):
    """Quotes every string: PyYAML would write the string "1e-6" plain, and Kubernetes reads that as a number."""


_QuotingDumper.add_representer(
    str, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"')
)


def to_text(data: Any) -> str:
    """Plain data as YAML that the API reads back as the same data."""
    return yaml.dump(data, Dumper=_QuotingDumper)


def read_neighbours(path: Path, documents: Iterable[Document]) -> tuple[list[Neighbour], list[Problem]]:
    """The RewardModels among the documents, and what is wrong with any of them."""
    found: list[Neighbour] = []
    problems: list[Problem] = []
    for document in documents:
        problems += [Problem(problem.path, problem.line, problem.message) for problem in document.problems]
        try:
            manifests = load_manifests(to_text(document.data), str(path))
        except InvalidManifestError as error:
            problems += [Problem(p.path, document.line_of(_parse(p.path)), p.message) for p in error.problems]
            continue
        for model in manifests:
            if not isinstance(model, RewardModel):
                continue
            if any(_key(other.model) == _key(model) for other in found):
                message = f"is the name of two RewardModels in this file, got {model.metadata.name}; rename one"
                problems.append(Problem("metadata.name", document.line_of(("metadata", "name")), message))
                continue
            found.append(Neighbour(model, document))
    return found, problems


def write_in(
    job: RLJob, document: Document, neighbours: list[Neighbour]
) -> tuple[RLJob, dict[int, Document], list[Problem]]:
    """The job with each reference replaced by its model; the models' documents by index of the reward; and what is
    wrong with the references."""
    by_key = {_key(neighbour.model): neighbour for neighbour in neighbours}
    rewards, sources, problems = [], {}, []
    for index, reward in enumerate(job.spec.rewards):
        reference = reward.reward_model_ref
        found = by_key.get((job.metadata.namespace, reference.name)) if reference else None
        if reference and found is None:
            location: Location = ("spec", "rewards", index, "rewardModelRef", "name")
            message = _describe_missing(reference.name, job, neighbours)
            path = f"spec.rewards[{index}].rewardModelRef.name"
            problems.append(Problem(path, document.line_of(location), message))
        if found is None:
            rewards.append(reward)
            continue
        scales = found.model.spec.autoscaling is not None
        if found.model.spec.is_served and found.model.spec.replicas == 0 and not scales:
            line = found.document.line_of(("spec", "replicas"))
            problems.append(Problem("spec.replicas", line, "must be at least 1 for `rljob run`, got 0; raise it"))
        rewards.append(_merge(reward, found.model))
        sources[index] = found.document
    return job.model_copy(update={"spec": job.spec.model_copy(update={"rewards": rewards})}), sources, problems


def locate(location: Location, document: Document, sources: dict[int, Document]) -> tuple[Location, Document]:
    """Where a field of the job was written: in the job's own document, or in that of a RewardModel."""
    if len(location) < 4 or location[:2] != ("spec", "rewards") or location[3] in _OF_THE_REWARD:
        return location, document
    index = location[2]
    source = sources.get(index) if isinstance(index, int) else None
    return (("spec", *location[3:]), source) if source else (location, document)


def _key(model: RewardModel) -> tuple[str, str]:
    return model.metadata.namespace, model.metadata.name


def _merge(reward: Reward, model: RewardModel) -> Reward:
    theirs = {name: getattr(model.spec, name) for name in type(model.spec).model_fields}
    return reward.model_copy(update=theirs | {"reward_model_ref": None})


def _describe_missing(name: str, job: RLJob, neighbours: list[Neighbour]) -> str:
    elsewhere = [n.model.metadata.namespace for n in neighbours if n.model.metadata.name == name]
    if elsewhere:
        return (
            f"must be a RewardModel of the job's namespace {job.metadata.namespace}, got one of {elsewhere[0]}; "
            "give both the same metadata.namespace"
        )
    names = ", ".join(sorted(n.model.metadata.name for n in neighbours))
    beside = f" (it has {names})" if names else ""
    return f"must be a RewardModel in this file, got {name}{beside}; {_REMEDY}"


def _parse(path: str) -> Location:
    from rljob_cli.check.jobfile import parse_path

    return parse_path(path)
