"""What the API server refused, in terms of the user's manifest. Pure.

`pod_checks` finds wrong names and types before anything is applied. What is left are wrong values, and the answers of
policies, of webhooks, and of a cluster whose version differs. Invariant: a message about a workload begins with a path
in the manifest.

The API server writes paths such as `spec.containers[0].image` and `spec.containers[0].resources.limits[cpu]`.
Invariant: each part but the last exists in the manifest, so a path that cannot be resolved gives the location of what
holds it. What an apply itself refuses, since this cluster does not know the field or its type, keeps the message with
its path.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rljob_api import foreign_texts
from rljob_api.read.documents import Location, format_path
from rljob_core.backend import (
    Manifest,
    MissingReferencesError,
    Owner,
    PodRejectedError,
    Reference,
    RefusedError,
)
from rljob_core.children import WORKLOAD_KINDS
from rljob_core.plan.causes import Cause, describe_rejection
from rljob_core.plan.validate import find_role_paths
from rljob_core.pod_checks.origin import RolePath, find_origin

_PART = re.compile(r"\[([^\]]*)\]|\.?([^.\[\]]+)")
_TEMPLATE_METADATA = re.compile(r"^spec\.template\.(labels|annotations)\b")
"""The API server leaves out `metadata` here."""


def find_location(manifest: Manifest, path: str) -> Location:
    """Return the keys and indices of `path` in `manifest`."""
    path = _TEMPLATE_METADATA.sub(r"spec.template.metadata.\1", path.lstrip("."))
    location: list[str | int] = []
    value: Any = manifest
    for match in _PART.finditer(path):
        part = match[1] or match[2] or ""
        part = int(part) if isinstance(value, list) and part.isdecimal() else part
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif isinstance(value, dict) and isinstance(part, str):
            value = value.get(part)
        else:
            break
        location.append(part)
    return tuple(location)


_TEMPLATE = ("spec", "template")
_NAMES = ("name", "secretName", "claimName")
"""Fields with the name of a Secret, ConfigMap or claim. One next to them, such as `key`, may have the same value."""


def describe_refusal(owner: Owner, child: Manifest, error: Exception) -> list[str]:
    """The problems of a child that was refused for good: each with the user's field, if it is known."""
    what = f"{child['kind']} {child['metadata']['name']} was refused"
    if child["kind"] not in WORKLOAD_KINDS:
        return [f"{what}: {error}"]
    role = find_role_paths(owner)[child["metadata"]["name"]]
    found = list(_describe_fields(role, child, error)) if isinstance(error, RefusedError) else []
    return found or [f"{role.path}.template: {what}: {error}"]


def _describe_fields(role: RolePath, workload: Manifest, error: RefusedError) -> Iterator[str]:
    for path, message in error.fields:
        location = find_location(workload, path)
        origin = None
        if location[: len(_TEMPLATE)] == _TEMPLATE:
            origin = find_origin(role, workload["spec"]["template"], location[len(_TEMPLATE) :])
        known = origin or f"{role.path}.template: {workload['kind']} {workload['metadata']['name']}: {path.lstrip('.')}"
        yield f"{known}: {message}"


def describe_pod_rejections(owner: Owner, errors: Mapping[str, PodRejectedError]) -> list[Cause]:
    """The causes of a job that waits because the Pods of these workloads are not admitted. What is the same for
    several roles is one cause, which names all."""
    roles, causes, groups = find_role_paths(owner), list[Cause](), dict[str, list[str]]()
    for workload, error in errors.items():
        if isinstance(error, MissingReferencesError):
            causes += [_describe_missing(owner, roles[workload], each) for each in error.missing]
        else:
            text = foreign_texts.REJECTED_POD.sub("", str(error), 1)  # the Pod's name
            groups.setdefault(text, []).append(workload)
    for text, workloads in groups.items():
        names = ", ".join(each.removeprefix(f"{owner.metadata.name}-") for each in workloads)
        paths = [roles[each].path.removeprefix("spec.") for each in workloads]
        path = f"spec.{{{','.join(paths)}}}" if len(paths) > 1 else roles[workloads[0]].path
        causes.append(describe_rejection(names, path, text, errors[workloads[0]].cause))
    return causes


def _describe_missing(owner: Owner, role: RolePath, missing: Reference) -> Cause:
    spec = owner.spec.to_manifest(exclude_defaults=True)
    places = [f"spec.{format_path(location)}" for location in _find_names(spec, missing, ())]
    path = ", ".join(places) or f"{role.path}.template"  # the same for all roles that need it: one cause
    return Cause.of("ReferenceMissing", path, f"{path}: {missing.kind} {missing.name} does not exist")


def _find_names(value: Any, wanted: Reference, location: Location) -> Iterator[Location]:
    """Yield where the manifest has the name in a field for the kind (secretKeyRef.name, configMap.name, secretName), or
    in a source on a claim."""
    kind = wanted.kind.lower()
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _find_names(inner, wanted, (*location, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _find_names(inner, wanted, (*location, index))
    else:
        is_source = kind == "persistentvolumeclaim" and str(value).startswith(f"pvc://{wanted.name}/")
        is_name = value == wanted.name and location[-1] in _NAMES
        if is_source or (is_name and any(kind in str(part).lower() for part in location)):
            yield location
