"""What the model sees of a function: a name, a description, and a JSON schema of its parameters.

Types come from the annotations, texts from a docstring in Google's style. Calls no user code except what resolving an
annotation runs. Standard library only.
"""

import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final

from rljob_api.functions.descriptions import Function
from rljob_api.functions.forms import FormError
from rljob_api.functions.tool_forms import check_tool
from rljob_service.worker.forms.inspection import read_parameters
from rljob_service.worker.forms.json_values import NotJsonError, to_json
from rljob_service.worker.forms.parameter_types import SUPPORTED_TYPES, Schema, UnsupportedTypeError, schema_of

_SECTIONS: Final = re.compile(
    r"^(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Warnings?|References|Attributes|Todo|"
    r"See Also):\s*$",
    re.MULTILINE,
)
_ARGUMENTS: Final = ("Args", "Arguments", "Parameters")
_PARAMETER: Final = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?\s*:\s*(.*)$")


def describe_tool(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ToolSchema. `given`: parameters that the policy does not see. Raise FormError."""
    found = read_parameters(name, function)
    check_tool(found)
    hints = _resolve_types(found, function)
    description, texts = read_docstring(inspect.getdoc(function) or "")
    defaults = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.default is not p.empty}
    properties: dict[str, dict[str, Any]] = {}
    for each in found.named:
        if each in given:
            continue
        text = {"description": texts[each]} if each in texts else {}
        properties[each] = _read_schema(found, each, hints) | text
        properties[each] |= _read_default(defaults, each)
    required = [each for each in properties if each in found.required]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": description, "parameters": parameters}


def _resolve_types(found: Function, function: Callable[..., Any]) -> dict[str, Any]:
    inner = inspect.unwrap(getattr(function, "func", function))
    try:
        return typing.get_type_hints(inner, include_extras=True)
    except Exception as error:  # a forward reference that does not exist, an expression that raises
        raise FormError(f"{found.show()}: its types cannot be resolved: {type(error).__name__}: {error}") from None


def _read_schema(found: Function, name: str, hints: Mapping[str, Any]) -> Schema:
    if name not in hints:
        raise FormError(
            f"{found.show()}: the parameter {name} has no type, which becomes its schema; write {name}: str, or one "
            f"of {SUPPORTED_TYPES}"
        )
    try:
        return schema_of(hints[name])
    except UnsupportedTypeError as error:
        raise FormError(
            f"{found.show()}: the parameter {name} has the type {error}, which has no JSON schema; use "
            f"{SUPPORTED_TYPES}"
        ) from None


def _read_default(defaults: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the default, where JSON has it and it is not null: without an argument, the function uses its own."""
    try:
        default = to_json(defaults.get(name), name)
    except (NotJsonError, RecursionError):
        return {}
    return {} if default is None else {"default": default}


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description, and the texts of the parameters, each as one line."""
    starts = [(match.start(), match.end(), match.group(1)) for match in _SECTIONS.finditer(text)]
    end = starts[0][0] if starts else len(text)
    ends = [start for start, _, _ in starts[1:]] + [len(text)]
    texts: dict[str, str] = {}
    for (_, begin, title), stop in zip(starts, ends, strict=False):
        if title in _ARGUMENTS:
            texts |= _read_arguments(text[begin:stop])
    return text[:end].strip(), texts


def _read_arguments(section: str) -> dict[str, str]:
    texts: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in textwrap.dedent(section).splitlines():
        match = _PARAMETER.match(line)
        if match:
            lines = texts.setdefault(match.group(1), [])
            lines.append(match.group(2).strip())
        elif line.startswith((" ", "\t")):
            lines.append(line.strip())
    return {name: " ".join(filter(None, lines)) for name, lines in texts.items()}
