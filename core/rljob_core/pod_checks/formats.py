"""Formats of single values in a Pod template, as the API server checks them. Each returns "must be ...", or nothing.

They follow k8s.io/apimachinery's and k8s.io/kubernetes' validation; a test compares them with a real API server.
"""

import re
from collections.abc import Callable
from typing import Any

from rljob_api.quantity import parse_quantity

Format = Callable[[Any], str]

_DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"
_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"


def matches(pattern: str, max_length: int, message: str) -> Format:
    compiled = re.compile(pattern, re.ASCII)

    def check(value: Any) -> str:
        return "" if len(value) <= max_length and compiled.fullmatch(value) else message

    return check


def one_of(*choices: str) -> Format:
    return lambda value: "" if value in choices else f"must be one of {', '.join(choices)}"


def between(minimum: int, maximum: int | None = None) -> Format:
    message = f"must be at least {minimum}" if maximum is None else f"must be from {minimum} to {maximum}"
    return lambda value: "" if minimum <= value and (maximum is None or value <= maximum) else message


is_dns_label = matches(_DNS_LABEL, 63, "must be at most 63 lower-case letters, digits and '-', as in my-name")
is_subdomain = matches(_SUBDOMAIN, 253, "must be lower-case letters, digits, '-' and '.', as in my.name")
is_label_value = matches(
    rf"({_NAME})?", 63, "must be at most 63 letters, digits, '-', '_' and '.', and begin and end with a letter or digit"
)
is_env_name = matches(r"[ -<>-~]+", 32768, "must be an environment variable's name, without '='")
is_config_key = matches(r"[-._a-zA-Z0-9]+", 253, "must be letters, digits, '-', '_' and '.'")
is_field_path = matches(
    r"metadata\.(name|namespace|uid|(labels|annotations)\[.*\])|spec\.(nodeName|serviceAccountName)"
    r"|status\.(hostIP|podIP)s?|metadata\.(labels|annotations)",
    512,
    "must be a field of the Pod such as metadata.name, spec.nodeName or status.podIP",
)
_is_prefix = matches(_SUBDOMAIN, 253, "x")
_is_name_part = matches(_NAME, 63, "x")


def is_qualified_name(value: str) -> str:
    """A key of labels, annotations and node selectors."""
    *prefix, name = value.split("/")
    is_valid = len(prefix) <= 1 and not any(map(_is_prefix, prefix)) and not _is_name_part(name)
    message = "must be a name such as gpu or example.com/gpu: letters, digits, '-', '_' and '.', at most 63 characters"
    return "" if is_valid else message


def is_port_name(value: str) -> str:
    is_valid = re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", value) and len(value) <= 15 and re.search("[a-z]", value)
    return "" if is_valid else "must be at most 15 lower-case letters, digits and single '-', with a letter"


def is_port(value: int | str) -> str:
    return is_port_name(value) if isinstance(value, str) else between(1, 65535)(value)


def is_not_blank(value: str) -> str:
    return "" if value else "must not be empty"


def is_image(value: str) -> str:
    return "" if value and value == value.strip() else "must be an image, without spaces around it"


def is_sub_path(value: str) -> str:
    is_valid = not value.startswith("/") and ".." not in value.split("/")
    return "" if is_valid else "must be a relative path without '..'"


def is_quantity(value: str | float) -> str:
    number = parse_quantity(value)
    if number is None:
        return "must be a quantity such as 500m, 2 or 16Gi"
    return "" if number >= 0 else "must be at least 0"
