"""Functions that the policy may call: from what the source defines to schemas, checked calls, and results as text.

Invariant: user code runs only with arguments that fit its schema, and a result is a str of a bounded length.
"""

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from rljob_api.functions import forms, tool_forms
from rljob_api.functions.descriptions import Class, Function
from rljob_api.functions.forms import FormError
from rljob_api.wire.contract import MAX_TOOL_RESULT_CHARACTERS
from rljob_service.worker.forms.arguments import ArgumentError, check_arguments
from rljob_service.worker.forms.binding import CallBinding
from rljob_service.worker.forms.inspection import describe, name_of
from rljob_service.worker.forms.json_values import to_text
from rljob_service.worker.forms.outcome import BAD_REQUEST, CallOutcome, failed_call
from rljob_service.worker.forms.parameter_types import build
from rljob_service.worker.forms.tool_schema import describe_tool, read_signature

_MAX_SHOWN_CHARACTERS: Final = 100


class ToolError(FormError):
    """A function that the policy cannot call."""

    def __init__(self, function: Any, problem: str) -> None:
        super().__init__(problem)
        self.function = function


class Tool(NamedTuple):
    function: Callable[..., Any]
    schema: dict[str, Any]
    """The fields of a ToolSchema."""
    constants: dict[str, Any]
    """Arguments that the policy does not see."""
    parameters: Function
    types: Mapping[str, Any]
    """Types of the parameters."""


class Element(NamedTuple):
    """A function, class or object that has tools."""

    name: str
    value: Any


def list_elements(name: str, value: Any) -> list[Element]:
    """Return the elements of an entry point: of a list each one, else itself. Raise FormError for an empty list."""
    if isinstance(value, Element):
        return [value]
    if not isinstance(value, (list, tuple)):
        return [Element(name, value)]
    if not value:
        raise FormError(f"{name} is an empty list; add functions to it")
    return [each for i, item in enumerate(value) for each in list_elements(name_of(item, f"{name}[{i}]"), item)]


def list_public(own: Sequence[tuple[str, Any]]) -> list[Element]:
    """Return the public functions among what a module defines, each once."""
    found: dict[int, Element] = {}
    for name, value in own:
        if not tool_forms.is_public(name) or inspect.isclass(value) or not _is_function(value):
            continue
        if id(value) not in found or getattr(value, "__name__", None) == name:
            found[id(value)] = Element(name, value)
    return list(found.values())


def _is_function(value: Any) -> bool:
    return inspect.isfunction(value) or (callable(value) and hasattr(value, "__wrapped__"))


def bind(
    elements: Sequence[Element],
    kwargs: Mapping[str, Any],
    factory_args: Mapping[str, Any] | None,
) -> tuple[list[dict[str, Any]], CallBinding]:
    """Return the schemas of all tools and how to call them. Raise ToolError or FormError.

    User code runs: the constructor of a class.
    """
    tools = [tool for each in elements for tool in _bind_element(each, kwargs, factory_args)]
    tool_forms.check_unique(tool.schema["name"] for tool in tools)
    if not any(inspect.isclass(each.value) for each in elements):
        tool_forms.check_kwargs((tool.parameters for tool in tools), kwargs)
    by_name = {tool.schema["name"]: tool for tool in tools}

    def call(request: dict[str, Any]) -> Any:
        name = request.get("function", "")
        tool = by_name.get(name)
        if tool is None:
            return failed_call(BAD_REQUEST, _describe_unknown(name, list(by_name)))
        try:
            given = check_arguments(name, tool.schema["parameters"], request["arguments"])
            given = {key: build(tool.types[key], each, key) for key, each in given.items()}
        except ArgumentError as error:
            return failed_call(BAD_REQUEST, str(error))
        return tool.function(**given, **tool.constants)

    return [tool.schema for tool in tools], CallBinding(call, lambda value, request: _read(value))


def _bind_element(
    element: Element, kwargs: Mapping[str, Any], factory_args: Mapping[str, Any] | None
) -> Iterator[Tool]:
    name, value = element
    try:
        found = describe(name, value)
        tool_forms.list_elements(found)
        if not isinstance(found, Class):
            yield _bind_function(name, value, kwargs)
            return
        methods = tool_forms.list_methods(found)
        if not found.is_instance:
            given = {**kwargs, **(factory_args or {})}
            if found.constructor is not None:
                forms.check_call(found.constructor._replace(name=name), given, "function.kwargs")
            value = value(**given)
    except FormError as error:
        raise ToolError(element.value, str(error)) from None
    for method in methods:
        yield _bind_function(method.name, getattr(value, method.name), {})


def _bind_function(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Tool:
    try:
        parameters, types, _ = read_signature(name, function)
        constants = {key: value for key, value in kwargs.items() if parameters.accepts(key)}
        return Tool(function, describe_tool(name, function, constants), constants, parameters, types)
    except FormError as error:
        raise ToolError(function, str(error)) from None


def _describe_unknown(name: str, known: Sequence[str]) -> str:
    shown = name[:_MAX_SHOWN_CHARACTERS]
    near = difflib.get_close_matches(shown, known, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return f"unknown function {shown}. {hint}Available functions: {', '.join(known)}"


def _read(value: Any) -> CallOutcome:
    return value if isinstance(value, CallOutcome) else CallOutcome(to_text(value, MAX_TOOL_RESULT_CHARACTERS))
