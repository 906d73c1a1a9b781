"""What Pods request of a node, as the scheduler counts it. Pure.

What is not requested counts as its limit, as the API server sets it. What a template has of another type than
Kubernetes, or a quantity that is none, counts as left out: the checks of Pod templates, or a dry run, report it.
"""

from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from rljob_api.quantity import format_bytes, parse_quantity
from rljob_core.backend import Manifest

_IN_BYTES = ("memory", "ephemeral-storage", "hugepages-")
_OF_PODS = ("cpu", "memory")
_Amounts = Counter[str]
"""Amounts of resources by name; Decimal where they are fractions of a unit."""


def sum_requests(pods: Iterable[tuple[Manifest, int]]) -> dict[str, str]:
    """The requests of Pods, given by their spec and number, as a Kubernetes ResourceList."""
    total = _Amounts()
    for spec, number in pods:
        for name, amount in _requests_of_pod(spec).items():
            total[name] += amount * number
    return {name: _format(name, Decimal(amount)) for name, amount in sorted(total.items()) if amount}


def _requests_of_pod(spec: Manifest) -> _Amounts:
    """The containers and sidecars together, or an earlier moment of the start if that needs more."""
    sidecars, most = _Amounts(), _Amounts()
    for container in spec.get("initContainers") or []:
        requests = _requests_of_container(container)
        if container.get("restartPolicy") == "Always":
            sidecars += requests
            most |= sidecars
        else:
            most |= sidecars + requests
    for container in spec.get("containers") or []:
        sidecars += _requests_of_container(container)
    # Resources of the whole Pod count in place of its containers'. It has no other ones, such as GPUs.
    whole = {n: a for n, a in _requests_of_container(spec).items() if n in _OF_PODS or n.startswith("hugepages-")}
    return _Amounts({**(most | sidecars), **whole})


def _requests_of_container(container: Manifest) -> _Amounts:
    resources = _as_mapping(container.get("resources"))
    requests = _as_mapping(resources.get("limits")) | _as_mapping(resources.get("requests"))
    return _Amounts({name: parse_quantity(value) or 0 for name, value in requests.items()})


def _as_mapping(value: Any) -> Manifest:
    return value if isinstance(value, dict) else {}


def _format(name: str, amount: Decimal) -> str:
    if name.startswith(_IN_BYTES):
        return format_bytes(int(amount.to_integral_value()))
    is_whole = amount == amount.to_integral_value()
    return str(int(amount)) if is_whole else f"{int((amount * 1000).to_integral_value())}m"
