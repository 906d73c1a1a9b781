"""Manifests from YAML: everything that is wrong with a file at once, each with its line, its path and a remedy.

Reads no other file: whether a model or a data set exists is the caller's business. Invariant: what load_manifests
returns obeys its types and every rule; what it refuses, it refuses for all reasons that can be seen together.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.manifest.base import DEFER_RULES, Spec, describe_violation
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardModel
from rljob_api.read.documents import Document, Location, format_path, read_documents
from rljob_api.read.validation_messages import (
    describe_error,
    find_similar_field,
    format_value,
    placeholder,
    suggest,
    type_at,
)
from rljob_api.version import API_VERSION

_KINDS: dict[str, type[RLJob] | type[RewardModel]] = {"RLJob": RLJob, "RewardModel": RewardModel}


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a manifest."""

    path: str
    """Path of the field, as in spec.rewards[0].name. Empty: the file or document as a whole."""
    line: int
    """Line in the file, from 1."""
    message: str
    """What is wrong and what would be right; a predicate to the path where there is one."""

    def __str__(self) -> str:
        return f"{self.path} {self.message}".strip()


class InvalidManifestError(UserError):
    """A file that is no valid manifest, with everything that is wrong with it."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = sorted(problems, key=lambda problem: problem.line)
        super().__init__("\n".join(f"{source}:{problem.line}: {problem}" for problem in self.problems))


def load_job(path: str | Path) -> RLJob:
    """The one RLJob of a file. RewardModels beside it are checked, too. UserError says what is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    jobs = [manifest for manifest in load_manifests(text, str(path)) if isinstance(manifest, RLJob)]
    if len(jobs) != 1:
        raise InvalidManifestError(
            str(path), [Problem("", 1, f"must hold exactly one RLJob, got {len(jobs) or 'none'}")]
        )
    return jobs[0]


def load_manifests(text: str, source: str) -> list[RLJob | RewardModel]:
    """Every manifest of a YAML text. `source` names it in messages. InvalidManifestError holds all problems."""
    documents, unreadable = read_documents(text)
    problems = [Problem(problem.path, problem.line, problem.message) for problem in unreadable]
    if not documents and not problems:
        problems.append(Problem("", 1, "is empty; it must hold an RLJob or a RewardModel"))
    manifests: list[RLJob | RewardModel] = []
    for document in documents:
        manifest, found = read_manifest(document)
        problems += found
        if manifest is not None:
            manifests.append(manifest)
    if problems:
        raise InvalidManifestError(source, problems)
    return manifests


def read_manifest(document: Document) -> tuple[RLJob | RewardModel | None, list[Problem]]:
    """Validate one document. With problems, the manifest has defaults in place of wrong values, or is None."""
    data = document.data
    problems = [Problem(problem.path, problem.line, problem.message) for problem in document.problems]
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
    """kind and apiVersion, which say how to read all the rest."""
    for key, choices in (("apiVersion", [API_VERSION]), ("kind", list(_KINDS))):
        value = document.data.get(key)
        expected = " or ".join(choices)
        if value is None:
            yield Problem(key, document.line_of(()), f"is required; write {key}: {expected}")
        elif value not in choices:
            hint = suggest(value, choices) if len(choices) > 1 else ""
            yield Problem(key, document.line_of((key,)), f"must be {expected}, got {format_value(value)}{hint}")


def _validate(
    model: type[RLJob] | type[RewardModel], data: dict[str, Any], document: Document
) -> tuple[RLJob | RewardModel | None, list[Problem]]:
    """The object, and what is wrong with it: fields first, then rules as far as valid fields allow."""
    problems: list[Problem] = []
    wrong: list[Location] = []
    manifest: RLJob | RewardModel | None = None
    try:
        manifest = _parse(model, data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        wrong = [detail["loc"] for detail in details]
        misspelled = {find_similar_field(model, loc) for loc in wrong}
        problems = [
            Problem(
                format_path(detail["loc"]),
                document.line_of(detail["loc"]),
                describe_error(model, detail["type"], detail["loc"], detail["input"], detail.get("ctx", {})),
            )
            for detail in details
            # A required field with a misspelled name is one mistake.
            if detail["type"] != "missing" or detail["loc"] not in misspelled
        ]
        manifest = _parse_with_placeholders(model, data, wrong)
    except (ValueError, RecursionError):
        return None, [Problem("", document.line_of(()), "refers to itself by a YAML alias; write the value out")]
    if manifest is not None:
        problems += _check_rules(manifest, wrong, document)
    return manifest, problems


def _parse(model: type[RLJob] | type[RewardModel], data: dict[str, Any]) -> RLJob | RewardModel:
    # Through JSON and strict, since that is how the API server gets it: "4" is no number, snake_case is unknown.
    text = json.dumps(data)
    return model.model_validate_json(text, strict=True, by_alias=True, by_name=False, context=DEFER_RULES)


def _parse_with_placeholders(
    model: type[RLJob] | type[RewardModel], data: dict[str, Any], wrong: list[Location]
) -> RLJob | RewardModel | None:
    """The manifest with its wrong values replaced by defaults or placeholders; None when that is not enough."""
    repaired = copy.deepcopy(data)
    for location in wrong:
        _substitute(model, repaired, location)
    try:
        return _parse(model, repaired)
    except ValidationError:
        return None


def _substitute(model: type[Spec], data: Any, location: Location) -> None:
    for part in location[:-1]:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return
    key = location[-1]
    stand_in = placeholder(type_at(model, location))
    if isinstance(data, dict):
        holder = type_at(model, location[:-1])
        required = isinstance(holder, type) and key in (placeholder(holder) or {})
        data.pop(key, None)
        if required:
            data[key] = stand_in
    elif isinstance(data, list) and isinstance(key, int):
        data[key] = stand_in


def _check_rules(manifest: Spec, wrong: list[Location], document: Document) -> Iterator[Problem]:
    """Broken rules, but for those that speak of a value that is wrong in itself."""
    for location, part in _parts(manifest, ()):
        for rule in part.RULES:
            blamed = [location + tuple(path.split(".") if path else ()) for path in rule.fields]
            if not any(_overlap(one, other) for one in blamed for other in wrong) and not rule.holds(part):
                yield Problem(format_path(blamed[0]), document.line_of(blamed[0]), describe_violation(rule, part))


def _overlap(one: Location, other: Location) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _parts(value: Any, location: Location) -> Iterator[tuple[Location, Spec]]:
    """Every Spec of an object with its location."""
    if isinstance(value, Spec):
        yield location, value
        for name, field in type(value).model_fields.items():
            yield from _parts(getattr(value, name), (*location, field.alias or name))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _parts(entry, (*location, index))
