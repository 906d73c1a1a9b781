"""A job file as `rljob` takes it: read, overridden by --set, its relative paths resolved, and its lines kept.

Leaves what a manifest may say to rljob_api.read.load, RewardModels in the same file to reward_models. Invariant: every
problem names a line of the user's own file, also when --set changed what is there.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_sections import DataSource
from rljob_api.manifest.reward import Reward, RewardModel
from rljob_api.manifest.scorers import ServedModel
from rljob_api.manifest.sources import parse_source
from rljob_api.read.documents import Document, Location, format_path, read_documents
from rljob_api.read.load import InvalidManifestError, Problem, load_job, load_manifests
from rljob_cli.check.reward_models import inline_reward_models, locate, read_reward_models, to_text

_MAX_REPAIRS = 4
_BLOCK = re.compile(r":\s*[|][-+0-9]*\s*(#.*)?$")
_PATH_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


@dataclass(frozen=True)
class JobFile:
    """One job and where it was written."""

    path: Path
    job: RLJob
    """With absolute paths."""
    document: Document
    problems: tuple[Problem, ...] = ()
    """What is wrong with the manifest. `job` is then as near to it as a valid one can be, for further checks alone."""
    sources: dict[int, Document] = field(default_factory=dict)
    """By index of the reward: the document of the RewardModel that was written into it."""
    reward_models: dict[str, RewardModel] = field(default_factory=dict)
    """Those of the job's namespace that stand in the file, by name."""

    def problem(self, path: str, message: str, line_within: int = 0) -> Problem:
        """A problem at a field; `line_within` counts from the first line of a block of text."""
        location, document = locate(parse_path(path), self.document, self.sources)
        line = document.line_of(location)
        lines = self.path.read_text(encoding="utf-8").splitlines()
        if line_within and line <= len(lines) and _BLOCK.search(lines[line - 1]):
            line += line_within
        return Problem(path if document is self.document else format_path(location), line, message)

    def is_known(self, path: str) -> bool:
        """Whether something at, above or below the field is a problem already."""
        return _is_known(path, self.problems)


def load(path: Path, overrides: Iterable[str] = (), *, keep_references: bool = False) -> JobFile:
    """Read a job file. UserError or InvalidManifestError say what is wrong with it. `keep_references`: rewardModelRef stays,
    as on a cluster; else the RewardModels of the file become the job's own rewards."""
    file = load_partial(path, overrides, keep_references=keep_references)
    if file.problems:
        raise InvalidManifestError(str(path), list(file.problems))
    return file


def load_partial(path: Path, overrides: Iterable[str] = (), *, keep_references: bool = False) -> JobFile:
    """Read a job file with mistakes as far as may be, so that other checks can add theirs."""
    if not path.is_file():
        raise UserError(f"{path}: {'is no file' if path.exists() else 'there is no such file'}; name a job's YAML file")
    document, others = _documents(path)
    models, problems = read_reward_models(path, others)
    for override in overrides:
        apply_override(document.data, override)
    problems += [Problem(problem.path, problem.line, problem.message) for problem in document.problems]
    job, found = _read_job(path, document, problems)
    problems += found
    sources: dict[int, Document] = {}
    if not keep_references:
        job, sources, found = inline_reward_models(job, document, models)
        problems += found
    models = [n.model for n in models if n.model.metadata.namespace == job.metadata.namespace]
    by_name = {model.metadata.name: model for model in models}
    return JobFile(path, resolve(job, path.parent), document, tuple(problems), sources, by_name)


def _read_job(path: Path, document: Document, others: list[Problem]) -> tuple[RLJob, list[Problem]]:
    """The job of the document, mended as far as may be, and what is wrong with it. Raises InvalidManifestError, with the
    problems of the file's `others`, when that is not enough."""
    data = copy.deepcopy(document.data)
    problems: list[Problem] = []
    for _ in range(_MAX_REPAIRS):
        try:
            jobs = [m for m in load_manifests(to_text(data), str(path)) if isinstance(m, RLJob)]
        except InvalidManifestError as error:
            found = [Problem(p.path, document.line_of(parse_path(p.path)), p.message) for p in error.problems]
            if problems and any(_is_known(problem.path, problems) for problem in found):
                break  # what was taken out is missing now: that is no further mistake
            problems += found
            if not all(_drop(data, location) for location in {parse_path(problem.path) for problem in found}):
                break
            continue
        return jobs[0], problems
    raise InvalidManifestError(str(path), [*others, *problems])


def _is_known(path: str, problems: Iterable[Problem]) -> bool:
    """Whether something at, above or below the field is among the problems."""
    mine = parse_path(path)
    known = [parse_path(problem.path) for problem in problems if problem.path]
    return any(mine[: len(other)] == other[: len(mine)] for other in known)


def _drop(data: Any, location: Location) -> bool:
    """Remove what is at the location; False when nothing is there."""
    for part in location[:-1]:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
    if not location or not isinstance(data, dict) or location[-1] not in data:
        return False
    del data[location[-1]]
    return True


def _documents(path: Path) -> tuple[Document, list[Document]]:
    """The document with the RLJob in it, and the others."""
    try:
        documents, problems = read_documents(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if problems:
        raise InvalidManifestError(str(path), [Problem(p.path, p.line, p.message) for p in problems])
    jobs = [d for d in documents if isinstance(d.data, dict) and d.data.get("kind") == "RLJob"]
    if len(jobs) > 1:
        message = f"must hold exactly one RLJob, got {len(jobs)}"
        raise InvalidManifestError(str(path), [Problem("", jobs[1].line_of(()), message)])
    if not jobs:
        load_job(path)  # says what stands there instead
        raise UserError(f"{path}: must hold exactly one RLJob")
    return jobs[0], [document for document in documents if document is not jobs[0]]


def parse_path(path: str) -> Location:
    """`spec.rewards[0].name` -> ('spec', 'rewards', 0, 'name')."""
    return tuple(int(index) if index else name for name, index in _PATH_PART.findall(path))


def apply_override(data: Any, override: str) -> None:
    """Set one value: `spec.schedule.steps=3`. The value is YAML; lists go by index, as in spec.rewards[0].slots."""
    path, separator, text = override.partition("=")
    location = parse_path(path)
    if not separator or not location:
        raise UserError(f"--set wants PATH=VALUE, as in spec.schedule.steps=3, got {override}")
    # The API's own reader, so that 1e-6 is a number here, too.
    documents, problems = read_documents(text)
    if problems:
        raise UserError(f"--set {path}: the value is no YAML: {problems[0].message}")
    for part, following in itertools.pairwise(location):
        data = _descend(data, part, following, override)
    last: Any = location[-1]
    if (isinstance(data, list) and isinstance(last, int) and last < len(data)) or isinstance(data, dict):
        data[last] = documents[0].data if documents else None
    else:
        raise UserError(f"--set {override}: there is nothing at {path}")


def _descend(data: Any, part: str | int, following: str | int, override: str) -> Any:
    if isinstance(data, dict) and isinstance(part, str):
        if data.get(part) is None:
            data[part] = [] if isinstance(following, int) else {}
        return data[part]
    if isinstance(data, list) and isinstance(part, int) and part < len(data):
        return data[part]
    raise UserError(f"--set {override}: there is nothing at {part}")


def resolve(job: RLJob, folder: Path) -> RLJob:
    """The job with every relative path made absolute, beginning at the job file's folder."""
    spec, data = job.spec, job.spec.data
    model = spec.model.model_copy(update={"source": _resolve_source(spec.model.source, folder)})
    sources = {"train": _resolve_data(data.train, folder)}
    if data.eval:
        sources["eval"] = _resolve_data(data.eval, folder)
    update = {
        "model": model,
        "data": data.model_copy(update=sources),
        "rewards": [_resolve_reward(reward, folder) for reward in spec.rewards],
    }
    return job.model_copy(update={"spec": spec.model_copy(update=update)})


def _resolve_source(source: str, folder: Path) -> str:
    try:
        parsed = parse_source(source)
    except UserError:
        return source  # preflight says so, with its place
    return str((folder / parsed.path).resolve()) if parsed.kind == "relative" else source


def _resolve_data(data: DataSource, folder: Path) -> DataSource:
    # verl's functions know a data set by its name; the user's name for it does not change with the folder.
    name = data.data_source if data.data_source is not None else data.source.partition("://")[2] or data.source
    return data.model_copy(update={"source": _resolve_source(data.source, folder), "data_source": name})


def _resolve_reward(reward: Reward, folder: Path) -> Reward:
    if reward.model is not None:
        return reward.model_copy(update={"model": _resolve_model(reward.model, folder)})
    if reward.judge is not None and reward.judge.model is not None:
        judge = reward.judge.model_copy(update={"model": _resolve_model(reward.judge.model, folder)})
        return reward.model_copy(update={"judge": judge})
    if reward.function is None or reward.function.file is None:
        return reward
    function = reward.function.model_copy(update={"file": str((folder / reward.function.file).resolve())})
    return reward.model_copy(update={"function": function})


def _resolve_model(model: ServedModel, folder: Path) -> ServedModel:
    return model.model_copy(update={"source": _resolve_source(model.source, folder)})
