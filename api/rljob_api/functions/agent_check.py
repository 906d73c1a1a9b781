"""Check a simulated user, tools or a program without running them: syntax, entry point, parameters and types.

Describes the source text; `user_forms`, `tool_forms` and `episode_forms` decide, as they do in a worker. Invariant:
user code is never executed, and what parsing cannot determine (an imported name) is not reported.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

from rljob_api.functions import episode_forms, forms, tool_forms, user_forms
from rljob_api.functions.conventions import Signatures
from rljob_api.functions.descriptions import Class, Description, Function, Several
from rljob_api.functions.forms import FormError
from rljob_api.functions.source import FunctionNode, SourceNames, parse


class AgentFunctionSpec(Protocol):
    """The fields of `function` that decide how it is called."""

    @property
    def entrypoint(self) -> str | None: ...
    @property
    def kwargs(self) -> Mapping[str, Any]: ...
    @property
    def factory_args(self) -> Mapping[str, Any] | None: ...


def check_user(
    source: str, filename: str, spec: AgentFunctionSpec, known: Signatures, columns: Collection[str] | None = None
) -> list[str]:
    """Return the problems of a simulated user's source, each beginning with `filename:line:`. `known`: the forms that
    are installed. `columns`: as of check_program."""
    names = _parse(source, filename, "the simulated user")
    if isinstance(names, list):
        return names
    return [f"{filename}:{line}: {text}" for line, text in _user(names, spec, known, columns)]


def check_tools(source: str, filename: str, spec: AgentFunctionSpec) -> list[str]:
    """Return the problems of a source of tools, each beginning with `filename:line:`."""
    names = _parse(source, filename, "the file of the tools")
    return names if isinstance(names, list) else [f"{filename}:{line}: {text}" for line, text in _tools(names, spec)]


def check_program(
    source: str, filename: str, spec: AgentFunctionSpec, columns: Collection[str] | None = None
) -> list[str]:
    """Return the problems of a program's source, each beginning with `filename:line:`. `columns`: of the data, besides
    the prompt and the answer; None if unknown."""
    names = _parse(source, filename, "the program")
    if isinstance(names, list):
        return names
    return [f"{filename}:{line}: {text}" for line, text in _program(names, spec, columns)]


def check_environment(source: str, filename: str, spec: AgentFunctionSpec, framework: str) -> list[str]:
    """Return the problems of an environment's source: its framework is known only where its packages are."""
    names = _parse(source, filename, "the environment")
    if isinstance(names, list):
        return names
    defined = _definitions(names)
    name = spec.entrypoint
    if "*" in names.statements or (name in names.statements if name is not None else names.statements):
        return []
    return [f"{filename}:1: {episode_forms.describe_missing_environment(name, framework, defined)}"]


def _parse(source: str, filename: str, what: str) -> SourceNames | list[str]:
    try:
        return SourceNames(parse(source, filename))
    except SyntaxError as error:
        return [f"{filename}:{error.lineno or 1}: {what} has a syntax error: {error.msg}"]
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deeply
        return [f"{filename}:1: {what} cannot be parsed: {error}"]


def _user(
    names: SourceNames, spec: AgentFunctionSpec, known: Signatures, columns: Collection[str] | None
) -> Iterator[tuple[int, str]]:
    def fits(methods: Mapping[str, object]) -> bool:
        return user_forms.is_user_class(methods, known)

    name = _find_class_or_function(names, spec.entrypoint, user_forms.RESPOND, fits)
    if name is None:
        if "*" not in names.statements:
            yield 1, user_forms.describe_missing_user(spec.entrypoint, _definitions(names), known)
        return
    try:
        found = _describe_made(names, name, spec)
        user_forms.plan_user(found, spec.kwargs, spec.factory_args, known, columns)
    except FormError as error:
        yield names.statements[name].lineno, str(error)


def _program(names: SourceNames, spec: AgentFunctionSpec, columns: Collection[str] | None) -> Iterator[tuple[int, str]]:
    name = _find_class_or_function(names, spec.entrypoint, episode_forms.RUN, episode_forms.is_program_class)
    if name is None:
        if "*" not in names.statements:
            yield 1, episode_forms.describe_missing_program(spec.entrypoint, _definitions(names))
        return
    try:
        found = _describe_made(names, name, spec)
        episode_forms.plan_program(found, spec.kwargs, spec.factory_args, columns)
    except FormError as error:
        yield names.statements[name].lineno, str(error)


def _find_class_or_function(
    names: SourceNames, entrypoint: str | None, default: str, fits: Callable[[Mapping[str, object]], bool]
) -> str | None:
    """Return the entry point: the named one, `default`, or the first class that fits."""
    if entrypoint is not None or default in names.statements:
        name = entrypoint or default
        return name if name in names.statements else None
    nodes = (name for name, node in names.statements.items() if isinstance(node, ast.ClassDef))
    classes = {name: found for name in nodes if isinstance(found := names.describe(name), Class)}
    complete = (name for name, found in classes.items() if fits(found.methods))
    # Inherited methods are unknown here; the server checks them.
    return next(iter((*complete, *(name for name, found in classes.items() if found.is_open))), None)


def _describe_made(names: SourceNames, name: str, spec: AgentFunctionSpec) -> Description:
    """Describe the entry point; of a factory, what it returns."""
    found = names.describe(name)
    if spec.factory_args is None or isinstance(found, Class):
        return found
    forms.check_factory(found, spec.factory_args)
    return names.describe_result(name)


def _tools(names: SourceNames, spec: AgentFunctionSpec) -> Iterator[tuple[int, str]]:
    try:
        found = _find_tools(names, spec)
    except FormError as error:
        yield names.statements[spec.entrypoint or tool_forms.TOOLS].lineno, str(error)
        return
    if not found:
        if "*" not in names.statements:
            yield 1, tool_forms.describe_missing_tools(spec.entrypoint, _definitions(names))
        return
    functions = list[Function]()
    for line, each in found:
        try:
            functions += _check_element(each, spec, names)
        except FormError as error:
            yield line, str(error)
    try:
        tool_forms.check_unique(function.name for function in functions)
        if all(isinstance(each, Function) for _, each in found) and len(functions) == len(found):
            tool_forms.check_kwargs(functions, spec.kwargs)
    except FormError as error:
        yield found[0][0], str(error)


def _check_element(found: Description, spec: AgentFunctionSpec, names: SourceNames) -> Iterable[Function]:
    given: Mapping[str, Any] = spec.kwargs
    if isinstance(found, Class):
        if not found.is_instance and found.constructor is not None:
            constructor = found.constructor._replace(name=found.name)
            forms.check_call(constructor, {**spec.kwargs, **(spec.factory_args or {})}, "function.kwargs")
        functions, given = tool_forms.list_methods(found), {}
    else:
        functions = [found] if isinstance(found, Function) else []
    for function in functions:
        tool_forms.check_tool(function, given, names.statements.__contains__)
    return functions


def _find_tools(names: SourceNames, spec: AgentFunctionSpec) -> list[tuple[int, Description]]:
    """Return what the policy may call, each with its line."""
    found = names.describe(tool_forms.TOOLS)
    entrypoint = spec.entrypoint or (tool_forms.TOOLS if isinstance(found, Several) else None)
    if entrypoint is not None:
        if entrypoint not in names.statements:
            return []
        line = names.statements[entrypoint].lineno
        found = _describe_made(names, entrypoint, spec) if spec.entrypoint else found
        return [(_line_of(names, each, line), each) for each in tool_forms.list_elements(found)]
    own = [(name, node) for name, node in names.statements.items() if tool_forms.is_public(name)]
    return [(node.lineno, names.describe(name)) for name, node in own if _defines_function(node)]


def _defines_function(node: ast.stmt) -> bool:
    return isinstance(node, FunctionNode) or isinstance(getattr(node, "value", None), ast.Lambda)


def _line_of(names: SourceNames, found: Description, default: int) -> int:
    statement = names.statements.get(found.name)
    return statement.lineno if isinstance(statement, FunctionNode | ast.ClassDef) else default


def _definitions(names: SourceNames) -> list[str]:
    return [name for name, node in names.statements.items() if isinstance(node, FunctionNode | ast.ClassDef)]
