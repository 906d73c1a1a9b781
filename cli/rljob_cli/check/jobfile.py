"""A job file as `rljob` uses it: parsed once, overridden by --set, with absolute paths and the line of each field.

Invariant: every problem points to a line of the user's own file, even if --set changed the value.

On a cluster a RewardModel runs on its own. `rljob run` has one job, so the RewardModel becomes the job's own reward.
Invariant: the fields of _REWARD_FIELDS stay the reward's own; the RewardModel provides all others.
"""

import contextlib
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardBase, RewardModel
from rljob_api.manifest.sources import parse_source
from rljob_api.read.documents import Document, Location, Problem, format_path, parse_path, read_documents
from rljob_api.read.load import InvalidManifestError, is_other_object, read_manifest
from rljob_cli.check import template_file
from rljob_cli.check.job_source import FIELD, StartModel, find_start_model, set_model, use_copy
from rljob_cli.check.other_objects import find_object_problems, inline_config_maps
from rljob_cli.check.peer_settings import count_common, explain_name, find_ours
from rljob_cli.check.template_file import inline_template
from rljob_cli.output import say
from rljob_inputs.data.files import suggest_path
from rljob_inputs.hub import read_source

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


_BLOCK = re.compile(r":\s*[|][-+0-9]*\s*(#.*)?$")
STDIN = Path("-")
RUNS = Path("runs")
"""Default of --dir."""
Target = Literal["local", "cluster"]
"""local: `rljob run` on this machine."""


@dataclass(frozen=True)
class JobFile:
    path: Path
    job: RLJob
    """With absolute paths."""
    document: Document
    lines: list[str]
    """The file's text."""
    problems: tuple[Problem, ...] = ()
    """What is wrong with the manifest. If any, `job` has defaults in place of wrong values, for further checks only."""
    local_problems: tuple[Problem, ...] = ()
    """What is missing for `rljob run`; a cluster may have it."""
    sources: dict[int, Document] = field(default_factory=dict)
    """By index of the reward: the document of the RewardModel that replaced its reference."""
    reward_models: dict[str, RewardModel] = field(default_factory=dict)
    """The file's RewardModels in the job's namespace, by name."""
    others: tuple[Document, ...] = ()
    """The file's other documents."""
    unused: tuple[Document, ...] = ()
    """Objects of other APIs that only kubectl uses."""
    relative: dict[str, str] = field(default_factory=dict)
    """By field: paths as written, which start at the file's folder."""
    named: dict[str, str] = field(default_factory=dict)
    """By field: names of models and data that only the CLI reads, as written."""
    start: StartModel | None = None
    """What job:// in spec.model.source means here; `job` has its path."""

    def problem(self, path: str, message: str, line_within: int = 0) -> Problem:
        """Build a problem at a field; `line_within` counts from the first line of a block of text."""
        location, document = locate(parse_path(path), self.document, self.sources)
        line = document.line_of(location)
        if line_within and line <= len(self.lines) and _BLOCK.search(self.lines[line - 1]):
            line += line_within
        return Problem(path if document is self.document else format_path(location), line, message)

    def has_problem(self, path: str) -> bool:
        """Whether the field, one above or one below it already has a problem."""
        location = parse_path(path)
        known = [parse_path(problem.path) for problem in self.problems if problem.path]
        return any(location[: len(other)] == other[: len(location)] for other in known)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or for a warning, may go wrong."""

    path: str
    message: str
    is_warning: bool = False
    line_within: int = 0
    """The line of a multi-line text at `path`, from 1."""
    only: Target | None = None
    """Where it matters. None: on this machine and on a cluster."""


def check_file(file: JobFile, findings: Iterable[Finding]) -> None:
    """Raise all errors at once, with the file's own problems; print warnings."""
    problems = [*file.problems, *file.local_problems]
    for finding in findings:
        if file.has_problem(finding.path):
            continue
        problem = file.problem(finding.path, finding.message, finding.line_within)
        if finding.is_warning:
            say(f"warning: {file.path}:{problem.line}: {problem}")
        else:
            problems.append(problem)
    if problems:
        raise InvalidManifestError(str(file.path), problems)


def load(path: Path, overrides: Iterable[str] = (), *, keep_references: bool = False, runs: Path = RUNS) -> JobFile:
    """Read a job file; raise UserError if it is wrong. RewardModels replace references, unless `keep_references`."""
    file = load_partial(path, overrides, keep_references=keep_references, runs=runs)
    check_file(file, ())
    return file


def load_partial(
    path: Path,
    overrides: Iterable[str] = (),
    *,
    keep_references: bool = False,
    runs: Path = RUNS,
    resumes: bool = True,
) -> JobFile:
    """Read a job file with errors as far as possible, so that other checks can add theirs. `runs`: the parent of run
    folders, for job://. With `resumes`, a run that has its model keeps it."""
    text = _read_text(path)
    document, others = _read_documents(path, text)
    objects = [other for other in others if is_other_object(other)]
    own = [other for other in others if not is_other_object(other)]
    for other in own:
        dict(read_local_names(other.data, path.parent))
    models, problems = read_reward_models(own)
    invalid = list(find_object_problems(objects))
    problems += invalid
    for override in overrides:
        apply_override(document.data, override)
    named = dict(read_local_names(document.data, path.parent))
    job, found = read_manifest(document)
    problems += map(_explain_unknown, found)
    if not isinstance(job, RLJob):
        raise InvalidManifestError(str(path), problems)
    sources: dict[int, Document] = {}
    local: list[Problem] = []
    start: StartModel | None = None
    if not keep_references:
        job, sources, local = inline_reward_models(job, document, models)
        if not invalid:
            job, objects, found = inline_config_maps(job, document, objects)
            problems += found
        job, start, found = _find_start(job, document, runs, resumes=resumes)
        local += found
        job = use_copy(job, path.parent, runs / job.metadata.name if resumes else None)
    relative = find_relative_paths(job)
    job, found = inline_template(job, document, path.parent)
    problems += found
    return JobFile(
        path=path,
        job=resolve(job, path.parent),
        document=document,
        lines=text.splitlines(),
        problems=tuple(problems),
        local_problems=tuple(local),
        sources=sources,
        reward_models={name: model for (space, name), (model, _) in models.items() if space == job.metadata.namespace},
        others=tuple(others),
        unused=tuple(objects),
        relative=relative,
        named=named,
        start=start,
    )


def read_local_names(data: Any, folder: Path, place: Location = ()) -> Iterator[tuple[str, str]]:
    """Replace what only this machine can read, and yield each field with its text: names of models and data, by those
    of a manifest; and function.module in the job's folder by function.file, which `rljob submit` takes along."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data if isinstance(data, list) else ()):
        here = (*place, key)
        if key not in _FREE_FORM:
            yield from read_local_names(value, folder, here)
        if key == "source" and isinstance(value, str) and (name := read_source(value, folder)) != value:
            data[key] = name
            yield format_path(here), value
        if (
            key == "function"
            and isinstance(value, dict)
            and "file" not in value
            and isinstance(value.get("module"), str)
        ):
            parts = Path(*value["module"].split("."))
            files = (parts.with_suffix(".py"), parts / "__init__.py")
            if found := next((file for file in files if (folder / file).is_file()), None):
                del value["module"]
                value["file"] = str(found)


_FREE_FORM = ("args", "env", "factoryArgs", "kwargs", "metadata", "template")
"""Fields whose keys are the user's or Kubernetes'."""


def _explain_unknown(problem: Problem) -> Problem:
    """Return a problem that names our field for a name of another trainer."""
    path, elsewhere = problem.path, problem.message.partition(" belongs in spec")[2]
    if problem.message.startswith("is unknown here;"):  # a name that is also ours
        found = find_ours(path, is_exact=True)
        if found and count_common(path, found[0]) >= count_common(path, elsewhere.removeprefix(".")):
            return replace(problem, message=f"is unknown; {found[1]}")
        return problem
    near = problem.message.partition("is unknown; did you mean ")[2]
    name = str((parse_path(path) or [""])[-1])
    if not problem.message.startswith("is unknown;") or near.lower() == f"{name.replace('_', '').lower()}?":
        return problem  # a name of ours, in another case
    meant = explain_name(path)
    return replace(problem, message=f"is unknown; {meant}") if meant else problem


def _find_start(
    job: RLJob, document: Document, runs: Path, *, resumes: bool
) -> tuple[RLJob, StartModel | None, list[Problem]]:
    """Return the job with a path in place of job://, what that means, and why it means nothing here."""
    folder = runs.resolve() / job.metadata.name if resumes else None
    try:
        start = find_start_model(job.spec.model.source, runs, folder)
        if start is not None and folder is None and start.pin.run == str((runs / job.metadata.name).resolve()):
            raise UserError(f"is the run that --fresh moves away, {start.pin.run}; give this job another name")
    except UserError as error:
        return job, None, [Problem(FIELD, document.line_of(parse_path(FIELD)), f"{error}")]
    if start is None:
        return job, None, []
    return set_model(job, start.path), start, []


def _read_text(path: Path) -> str:
    """Return the text of a file, or of stdin, whose relative paths start at the current folder."""
    if path == STDIN:
        return sys.stdin.read()
    if not path.is_file():
        reason = "not a file" if path.exists() else f"not found{suggest_path(path)}"
        raise UserError(f"{path}: {reason}; pass the path of a job's YAML file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start}); save the file as UTF-8") from None


def _read_documents(path: Path, text: str) -> tuple[Document, list[Document]]:
    documents, problems = read_documents(text)
    jobs = [d for d in documents if isinstance(d.data, dict) and d.data.get("kind") == "RLJob"]
    if len(jobs) > 1:
        problems.append(Problem("", jobs[1].line_of(()), f"must contain exactly one RLJob, got {len(jobs)}"))
    if not jobs and not problems:
        problems = [problem for document in documents for problem in read_manifest(document)[1]]
        problems = problems or [Problem("", 1, "must contain exactly one RLJob, got none")]
    if problems:
        raise InvalidManifestError(str(path), problems)
    return jobs[0], [document for document in documents if document is not jobs[0]]


def apply_override(data: Any, override: str) -> None:
    """Set one value: `spec.schedule.steps=3`. The value is YAML; list entries have an index: spec.rewards[0].slots."""
    path, separator, text = override.partition("=")
    location = parse_path(path)
    if not separator or not location:
        raise UserError(f"--set must be PATH=VALUE, as in spec.schedule.steps=3, got {override}")
    # The API's reader, so that 1e-6 is a number here, too.
    documents, problems = read_documents(text)
    if problems:
        raise UserError(f"--set {path}: the value is not YAML: {problems[0].message}")
    last = location[-1]
    for part, following in itertools.pairwise(location):
        _check_key(data, part, override)
        if isinstance(data, dict) and data.get(part) is None:
            data[part] = [] if isinstance(following, int) else {}
        data = data[part]
    _check_key(data, last, override)
    data[last] = documents[0].data if documents else None


def _check_key(data: Any, key: str | int, override: str) -> None:
    is_index = isinstance(data, list) and isinstance(key, int) and key < len(data)
    if not is_index and not (isinstance(data, dict) and isinstance(key, str)):
        entries = f"; the entries of the list are [0] to [{len(data) - 1}]" if isinstance(data, list) and data else ""
        raise UserError(f"--set {override}: {key} does not exist{entries}")


def resolve(job: RLJob, folder: Path) -> RLJob:
    """Make relative paths absolute; they start at the job file's folder."""
    job = job.model_copy(deep=True)
    spec = job.spec
    for data in (*(each.source for each in spec.data.train_sources), *(each.data for each in spec.held_out_sets)):
        data.source = _resolve_source(data.source, folder)
    for model in (spec.model, *spec.served_models.values()):
        model.source = _resolve_source(model.source, folder)
    for function in spec.functions.values():
        if function.file is not None:
            function.file = str((folder / Path(function.file).expanduser()).resolve())
    if (runner := spec.agent.runner) and runner.working_dir is not None:
        runner.working_dir = str((folder / runner.working_dir).resolve())
    if (custom := spec.tracking.custom) and ".py:" in custom:
        spec.tracking.custom = str((folder / custom).resolve())
    return job


def find_relative_paths(job: RLJob) -> dict[str, str]:
    """Return the paths that `resolve` makes absolute, by field."""
    spec = job.spec
    files = {f"{path}.file": function.file for path, function in spec.functions.items() if function.file is not None}
    if (runner := spec.agent.runner) and runner.working_dir is not None:
        files["spec.agent.runner.workingDir"] = runner.working_dir
    if (template := spec.model.chat_template) and template.file is not None:
        files[template_file.FIELD] = template.file
    return {path: source for path, source in spec.sources.items() if _is_relative(source)} | {
        path: file for path, file in files.items() if not Path(file).is_absolute()
    }


def _is_relative(source: str) -> bool:
    with contextlib.suppress(UserError):
        return parse_source(source).kind == "relative"
    return False


def _resolve_source(source: str, folder: Path) -> str:
    try:
        parsed = parse_source(source)
    except UserError:
        return source  # preflight reports it with its place
    return str((folder / parsed.path).resolve()) if parsed.kind == "relative" else source
