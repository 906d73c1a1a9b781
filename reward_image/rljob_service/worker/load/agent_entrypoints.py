"""The simulated user or the tools in a user's source: which names they have, and how they are bound.

Apart from the entry points of rewards, whose workers do not import this. Raises UserErrors and FormErrors; loading adds
the place. Standard library only.

Tools: from what the source defines to schemas, checked calls, and results as text. Invariant: user code runs only with
arguments that fit its schema, and a result is a str of a bounded length.
"""

import difflib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from rljob_api.errors import UserError
from rljob_api.functions import forms, named_forms, tool_forms
from rljob_api.functions.descriptions import Class, Function
from rljob_api.functions.forms import FormError
from rljob_api.wire.contract import MAX_TOOL_RESULT_CHARACTERS
from rljob_service.worker.forms import inspection, user
from rljob_service.worker.forms.arguments import ArgumentError, check_arguments
from rljob_service.worker.forms.binding import CallBinding
from rljob_service.worker.forms.inspection import describe, name_of
from rljob_service.worker.forms.json_values import to_text
from rljob_service.worker.forms.outcome import BAD_REQUEST, CallOutcome, failed_call
from rljob_service.worker.forms.tool_schema import describe_tool
from rljob_service.worker.load.entrypoints import BoundFunction, Found, Named, list_defined, list_own
from rljob_service.worker.settings import CODE_MODULE, TOOLS, USER, FunctionSettings

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


def bind_tools(
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
        parameters = inspection.read_parameters(name, function)
        constants = {key: value for key, value in kwargs.items() if parameters.accepts(key)}
        return Tool(function, describe_tool(name, function, constants), constants, parameters)
    except FormError as error:
        raise ToolError(function, str(error)) from None


def _describe_unknown(name: str, known: Sequence[str]) -> str:
    shown = name[:_MAX_SHOWN_CHARACTERS]
    near = difflib.get_close_matches(shown, known, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return f"unknown function {shown}. {hint}Available functions: {', '.join(known)}"


def _read(value: Any) -> CallOutcome:
    return value if isinstance(value, CallOutcome) else CallOutcome(to_text(value, MAX_TOOL_RESULT_CHARACTERS))


_OWN_TOOLS: Final = ("rljob_service.worker.mcp_client", CODE_MODULE)
"""Modules of the image whose classes have the schemas of their tools, and answer calls themselves."""


def find(module: types.ModuleType, settings: FunctionSettings) -> Found:
    """Return the entry point. Raise UserError, with what the source defines, if it has none."""
    own = list_own(module, settings)
    defined = [name for name, value in own if inspect.isfunction(value) or inspect.isclass(value)]
    if settings.serves == USER:
        candidates = _find_user(module, settings, own)
        problem = named_forms.describe_missing_user(settings.entrypoint, defined)
    else:
        candidates = _find_tools(module, settings, own)
        problem = tool_forms.describe_missing_tools(settings.entrypoint, defined)
    if candidates:
        return Found(*candidates[0])
    raise UserError(f"{settings.path}:1: {problem}")


def _find_user(module: types.ModuleType, settings: FunctionSettings, own: Named) -> Named:
    found = list_defined(module, [settings.entrypoint or named_forms.RESPOND])
    if found or settings.entrypoint is not None:
        return found
    classes = [(name, value) for name, value in own if inspect.isclass(value)]
    return [(name, value) for name, value in classes if named_forms.RESPOND in dir(value)]


def _find_tools(module: types.ModuleType, settings: FunctionSettings, own: Named) -> Named:
    if settings.entrypoint is not None:
        return list_defined(module, [settings.entrypoint])
    if isinstance(listed := getattr(module, tool_forms.TOOLS, None), (list, tuple)):
        return [(tool_forms.TOOLS, listed)]
    public = list_public(own)
    return [(tool_forms.TOOLS, public)] if public else []


def bind(found: Found, settings: FunctionSettings, path: str) -> BoundFunction:
    """Bind what the server serves. Raise FormError if it cannot be called. User code runs: a factory, constructors."""
    made = _make(found, settings)
    return (_bind_user if settings.serves == USER else _bind_tools)(made, settings, path)


def _bind_user(found: Found, settings: FunctionSettings, path: str) -> BoundFunction:
    name, value = found
    described = inspection.describe(name, value)
    plan = named_forms.plan_user(described, settings.kwargs, settings.factory_args)
    if isinstance(described, Function):
        calls, signature = user.bind(value, described, settings.kwargs), named_forms.RESPOND
    else:
        made = value(**plan.arguments) if inspect.isclass(value) else value
        method = getattr(made, plan.method)
        calls, signature = user.bind(method, inspection.read_parameters(plan.method, method), {}), name
    return BoundFunction(None, None, name_of(value, name), signature, path, calls=calls)


def _bind_tools(found: Found, settings: FunctionSettings, path: str) -> BoundFunction:
    if settings.module in _OWN_TOOLS:
        own = found.value(**settings.factory_args or {})
        calls = CallBinding(own.call, lambda value, request: value, lambda: own.problem)
        names = ", ".join(schema["name"] for schema in own.schemas)
        return BoundFunction(None, None, names, TOOLS, path, calls=calls, tools=tuple(own.schemas))
    elements = list_elements(*found)
    schemas, calls = bind_tools(elements, settings.kwargs, settings.factory_args)
    names = ", ".join(schema["name"] for schema in schemas)
    return BoundFunction(None, None, names, TOOLS, path, calls=calls, tools=tuple(schemas))


def _make(found: Found, settings: FunctionSettings) -> Found:
    """Return the entry point; of a factory, what it returns."""
    is_list = settings.serves == TOOLS and settings.entrypoint is None
    if settings.factory_args is None or inspect.isclass(found.value) or is_list:
        return found
    forms.check_factory(inspection.describe(found.name, found.value), settings.factory_args)
    return Found(found.name, found.value(**settings.factory_args))
