"""Load manifests from YAML, and report all problems of a file at once, each with line, path and remedy.

Reads no other file: callers check that models and datasets exist. Invariant: manifests that load_manifests returns
conform to their types and to all rules.
"""

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.manifest.base import DEFER_RULES, Spec, describe_violation, yaml_fields
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.policy import RLJobPolicy
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.read.documents import Document, Location, Problem, format_path, read_documents
from rljob_api.read.validation_messages import (
    describe_choice,
    describe_error,
    find_intended_field,
    format_value,
    placeholder,
    type_at,
)
from rljob_api.wire.contract import API_VERSION

Manifest = RLJob | RewardModel
Part = TypeVar("Part", bound=Spec)
_KINDS: dict[str, type[RLJob] | type[RewardModel]] = {"RLJob": RLJob, "RewardModel": RewardModel}


class InvalidManifestError(UserError):
    """A file that is not a valid manifest, with all its problems."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = sorted(problems, key=lambda problem: problem.line)
        super().__init__("\n".join(f"{source}:{problem.line}: {problem}" for problem in self.problems))


def load_job(path: str | Path) -> RLJob:
    """Return the one RLJob of a file; validate its RewardModels, too. Raises UserError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    jobs = [manifest for manifest in load_manifests(text, str(path)) if isinstance(manifest, RLJob)]
    if len(jobs) != 1:
        message = f"must contain exactly one RLJob, got {len(jobs) or 'none'}"
        raise InvalidManifestError(str(path), [Problem("", 1, message)])
    return jobs[0]


def load_manifests(text: str, source: str) -> list[Manifest]:
    """Return all manifests of a YAML text; `source` names it in messages. Objects of other APIs are left out. Raises
    InvalidManifestError."""
    documents, problems = read_documents(text)
    documents = [document for document in documents if not is_other_object(document)]
    if not documents and not problems:
        problems.append(Problem("", 1, "is empty; it must contain an RLJob or a RewardModel"))
    manifests: list[Manifest] = []
    for document in documents:
        manifest, found = read_manifest(document)
        problems += found
        if manifest is not None:
            manifests.append(manifest)
    if problems:
        raise InvalidManifestError(source, problems)
    return manifests


def is_other_object(document: Document) -> bool:
    """Whether a document is a Kubernetes object of another API, such as a ConfigMap, which kubectl takes as well."""
    data = document.data
    if not isinstance(data, dict):
        return False
    api_version, kind = data.get("apiVersion"), data.get("kind")
    if not (isinstance(api_version, str) and isinstance(kind, str) and api_version and kind):
        return False
    return kind not in _KINDS and api_version.partition("/")[0] != API_VERSION.partition("/")[0]


def read_manifest(document: Document) -> tuple[Manifest | None, list[Problem]]:
    """Validate one document. With problems, the manifest has defaults in place of wrong values, or is None."""
    data = document.data
    problems = list(document.problems)
    if not isinstance(data, dict):
        message = f"must be a mapping with apiVersion and kind, got {format_value(data)}"
        return None, [*problems, Problem("", document.line_of(()), message)]
    problems += _check_header(document)
    model = _KINDS.get(data["kind"]) if isinstance(data.get("kind"), str) else None
    if model is None:
        return None, problems
    manifest, found = _validate(model, {**data, "apiVersion": API_VERSION}, document)
    return manifest, problems + found


def _check_header(document: Document) -> Iterator[Problem]:
    for key, choices in (("apiVersion", [API_VERSION]), ("kind", list(_KINDS))):
        value = document.data.get(key)
        expected = " or ".join(choices)
        if value is None:
            yield Problem(key, document.line_of(()), f"is required; write {key}: {expected}")
        elif value == RLJobPolicy.__name__:
            remedy = "`rljob validate JOB.yaml --policy FILE` checks a policy, and what it means for a job"
            yield Problem(key, document.line_of((key,)), f"must be {expected}, got {value}; {remedy}")
        elif value not in choices:
            yield Problem(key, document.line_of((key,)), describe_choice(value, choices, expected))


def read_section(model: type[Part], document: Document) -> tuple[Part | None, list[Problem]]:
    """Validate a document of another type than a manifest, such as the operator's defaults. As read_manifest."""
    if not isinstance(document.data, dict):
        message = f"must be a mapping (name: value), got {format_value(document.data)}"
        return None, [*document.problems, Problem("", document.line_of(()), message)]
    part, problems = _validate(model, document.data, document)
    return part, [*document.problems, *problems]


def _validate(model: type[Part], data: dict[str, Any], document: Document) -> tuple[Part | None, list[Problem]]:
    """Return the object and its problems: of fields first, then of the rules over valid fields."""
    problems: list[Problem] = []
    invalid: list[Location] = []
    manifest: Part | None = None
    try:
        manifest = _parse(model, data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        invalid = [detail["loc"] for detail in details]
        misspelled = {meant for location in invalid if (meant := find_intended_field(model, location))}
        problems = [
            Problem(
                format_path(detail["loc"]),
                document.line_of(detail["loc"]),
                describe_error(model, detail["type"], detail["loc"], detail["input"], detail.get("ctx", {})),
            )
            for detail in details
            # A required field with a misspelled name is one problem, not two; so is a rule over a misspelled field.
            if detail["type"] != "missing" or detail["loc"] not in misspelled
        ]
        # Check the rules over the other fields, too. Without placeholders for some values, this is impossible.
        repaired = copy.deepcopy(data)
        for location in invalid:
            _substitute(model, repaired, location)
        with contextlib.suppress(ValidationError):
            manifest = _parse(model, repaired)
        invalid += misspelled
    if manifest is not None:
        problems += _check_rules(manifest, invalid, document)
    return manifest, problems


def _parse(model: type[Part], data: dict[str, Any]) -> Part:
    # Strict JSON, as for the API server: "4" is not a number, and snake_case names are unknown.
    text = json.dumps(data)
    return model.model_validate_json(text, strict=True, by_alias=True, by_name=False, context=DEFER_RULES)


def _substitute(model: type[Spec], data: Any, location: Location) -> None:
    for part in location[:-1]:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return
    key = location[-1]
    value = placeholder(type_at(model, location))
    if isinstance(data, dict):
        required = key in (placeholder(type_at(model, location[:-1])) or {})
        data.pop(key, None)
        if required:
            data[key] = value
    elif isinstance(data, list) and isinstance(key, int):
        data[key] = value


def _check_rules(manifest: Spec, invalid: list[Location], document: Document) -> Iterator[Problem]:
    """Yield violated rules, except those over fields that are invalid themselves."""
    for location, part in _parts(manifest, ()):
        for rule in part.RULES:
            used = [location + tuple(path.split(".") if path else ()) for path in rule.fields]
            overlap = any(one[: len(other)] == other[: len(one)] for one in used for other in invalid)
            if not overlap and not rule.holds(part):
                yield Problem(format_path(used[0]), document.line_of(used[0]), describe_violation(rule, part))


def _parts(value: Any, location: Location) -> Iterator[tuple[Location, Spec]]:
    if isinstance(value, Spec):
        yield location, value
        for alias, (name, _) in yaml_fields(type(value)).items():
            yield from _parts(getattr(value, name), (*location, alias))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _parts(entry, (*location, index))
