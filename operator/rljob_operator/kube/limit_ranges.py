"""Which LimitRange an answer to the creation of a Pod is about: the API server does not name it. Pure.

It writes a range's defaults into the Pod before it validates requests against limits, so that a request above a default
limit is an invalid field that is not in the job. The message about a bound has its kind and value.
"""

import re
from collections.abc import Iterable, Iterator

from rljob_api.quantity import parse_quantity
from rljob_core.backend import Manifest
from rljob_core.kube.client import ApiError

_ABOVE_DEFAULT = re.compile(
    r'Invalid value: "(?P<request>[^"]+)": must be less than or equal to (?P<resource>\S+) limit of (?P<limit>\S+)'
)
_REQUESTS = re.compile(r"spec\.(?P<kind>containers|initContainers)\[\d+\]\.resources\.requests")
_BOUND = re.compile(
    r"(?P<bound>maximum|minimum) (?P<resource>\S+) usage per (?P<type>Container|Pod) is (?P<value>\S+?)[.,]?\s"
)
_RATIO = re.compile(r"(?P<resource>\S+) max limit to request ratio per (?P<type>Container|Pod) is (?P<value>\S+?)[,\s]")
_FIELDS = {"maximum": ("max",), "minimum": ("min",)}


def is_about_limits(error: ApiError, spec: Manifest) -> bool:
    """Whether a LimitRange may be the reason. `spec` is that of the Pod as it was sent."""
    return bool(_BOUND.search(error.message) or _RATIO.search(error.message) or any(_find_defaults(error, spec)))


def describe(error: ApiError, spec: Manifest, ranges: Iterable[Manifest]) -> str:
    """Return what the namespace's LimitRanges forbid. If none has the value, as when they cannot be read, no name."""
    ranges = list(ranges)
    defaults = [_describe_default(ranges, *default) for default in _find_defaults(error, spec)]
    if defaults:
        return "; ".join(dict.fromkeys(defaults))
    matches = [(match, _FIELDS[match["bound"]]) for match in _BOUND.finditer(error.message)]
    matches += [(match, ("maxLimitRequestRatio",)) for match in _RATIO.finditer(error.message)]
    found = [_find_names(ranges, match["type"], fields, match["resource"], match["value"]) for match, fields in matches]
    _, _, reason = error.message.rpartition("is forbidden: ")  # before it: a generated name
    return f"{_join(name for names in found for name in names)}: {reason}"


def _find_defaults(error: ApiError, spec: Manifest) -> Iterator[tuple[Manifest, str, str]]:
    """Yield container, resource and limit of each request above a limit that the Pod did not have. The index in the
    answer counts containers that webhooks have added, so a container is found by its request."""
    for cause in error.causes:
        place = _REQUESTS.match(str(cause.get("field", "")))
        match = _ABOVE_DEFAULT.search(str(cause.get("message", "")))
        if place is None or match is None:
            continue
        for container in spec.get(place["kind"]) or []:
            resource, resources = match["resource"], container.get("resources") or {}
            request = parse_quantity((resources.get("requests") or {}).get(resource, ""))
            is_limited = resource in (resources.get("limits") or {})
            if request is not None and request == parse_quantity(match["request"]) and not is_limited:
                yield container, resource, match["limit"]


def _describe_default(ranges: list[Manifest], container: Manifest, resource: str, limit: str) -> str:
    request = container["resources"]["requests"][resource]
    names = _join(_find_names(ranges, "Container", ("default", "max"), resource, limit))
    return (
        f"{names} limits {resource} of containers without a limit to {limit}, below the request of {request} "
        f"of container {container['name']}"
    )


def _find_names(ranges: list[Manifest], kind: str, fields: tuple[str, ...], resource: str, value: str) -> list[str]:
    wanted = parse_quantity(value)
    return [
        each["metadata"]["name"]
        for each in ranges
        for item in each["spec"].get("limits") or []
        if item["type"] == kind
        and any(parse_quantity((item.get(field) or {}).get(resource, "")) == wanted for field in fields)
    ]


def _join(names: Iterable[str]) -> str:
    known = " and ".join(dict.fromkeys(names))
    return f"LimitRange {known}" if known else "a LimitRange"
