"""Requests and limits of a container, as the API server checks them: names, whole devices, requests above limits."""

from collections.abc import Iterator, Mapping
from typing import Any

from rljob_api.quantity import parse_quantity
from rljob_core.pod_checks.formats import is_qualified_name
from rljob_core.pod_checks.schema import Violation

_INTENDED = {
    **{"mem": "memory", "ram": "memory", "cpus": "cpu", "disk": "ephemeral-storage", "storage": "ephemeral-storage"},
    **dict.fromkeys(("gpu", "gpus", "nvidia", "nvidia-gpu"), "nvidia.com/gpu"),
}
"""Names that people write, and the resources that they mean."""


def check_resources(resources: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield what is wrong with the requests and limits of a container."""
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for kind, quantities in (("limits", limits), ("requests", requests)):
        for name, value in quantities.items():
            number = parse_quantity(value)
            if message := _check_resource_name(name):
                yield (kind, name), message
            elif _is_integer(name) and number is not None and number != number.to_integral_value():
                yield (kind, name), f"must be a whole number: {name} cannot be divided, got {value}"
    for name, value in requests.items():
        number, limit = parse_quantity(value), parse_quantity(limits.get(name, value))
        if number is None or limit is None or _check_resource_name(name):
            continue
        if _is_overcommittable(name):
            if number > limit:
                message = f"must be at most the limit {limits[name]}, got {value}; lower it, or raise the limit"
                yield ("requests", name), message
        elif name not in limits:
            yield ("requests", name), f"needs an equal limit: {name} cannot be overcommitted; set limits, too"
        elif number != limit:
            yield ("requests", name), f"must equal the limit {limits[name]}, got {value}; make both equal"
    hugepages = [name for name in limits if _is_hugepages(name)]
    if hugepages and not {"cpu", "memory"} & {*limits, *requests}:
        yield ("limits", hugepages[0]), "needs cpu or memory in addition; set either"


def _check_resource_name(name: str) -> str:
    hint = f"; did you mean {_INTENDED[name.lower()]}?" if name.lower() in _INTENDED else ""
    if "/" not in name:
        is_known = name in ("cpu", "memory", "ephemeral-storage") or (_is_hugepages(name) and parse_quantity(name[10:]))
        return "" if is_known else f"must be cpu, memory, ephemeral-storage or a device such as nvidia.com/gpu{hint}"
    is_device = "kubernetes.io/" in name or not name.startswith("requests.")
    message = is_qualified_name(name) or ("" if "kubernetes.io/" in name else is_qualified_name(f"requests.{name}"))
    return message if is_device else "must not begin with requests."


def _is_hugepages(name: str) -> bool:
    return name.startswith("hugepages-")


def _is_integer(name: str) -> bool:
    return "/" in name and "kubernetes.io/" not in name


def _is_overcommittable(name: str) -> bool:
    return not _is_integer(name) and not _is_hugepages(name)
