"""Decides how a program is called for each episode: `run`, as a function or as the method of a class.

A worker describes the loaded object. Pure, standard library only.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from rljob_api.functions.descriptions import Class, Description, Function, Several
from rljob_api.functions.forms import FormError, check_call
from rljob_api.functions.remedies import describe_wrong_entrypoint

RUN: Final = "run"
"""The default entry point; and the method of a class."""
SETUP: Final = "setup"
"""Method of a class, called before each episode."""
CLOSE: Final = "close"
"""Method of a class, called after each episode, however it ended."""
CLIENT: Final = "client"
"""The parameter that gets an OpenAI client."""
HTTP_CLIENT: Final = "http_client"
"""What some projects pass besides: their programs do without it."""

VALUES: Final = (
    "prompt", "messages", "question", "answer", "ground_truth", "data_source", "extra_info", "task", "data", "example",
    "base_url", "api_key", "model", CLIENT, "seed", "attempt", "episode", "max_turns",
)  # fmt: skip
"""What `run` may take, by name; any other parameter is a column of the data."""

_FORM: Final = "def run(prompt, client): ..."


class ProgramPlan(NamedTuple):
    """How to use an entry point."""

    kind: Literal["function", "class"]
    """function: call it. class: call its method."""
    method: str = ""
    """Name of the method to call, for kind class."""
    arguments: Mapping[str, Any] = {}
    """Arguments of the constructor, for a class."""


def is_program_class(methods: Mapping[str, object] | Sequence[str]) -> bool:
    """Return whether a class with these methods is a program."""
    return RUN in methods


def plan_program(
    found: Description,
    kwargs: Mapping[str, Any],
    factory_args: Mapping[str, Any] | None,
) -> ProgramPlan:
    """Return how to call it, or raise FormError with the fix."""
    if isinstance(found, Function):
        _check_call(found, kwargs)
        return ProgramPlan("function")
    if not isinstance(found, Class):
        what = "a list" if isinstance(found, Several) else f"a {found.what}"
        raise FormError(f"{found.name} is {what}; set function.entrypoint to a function or a class, such as {_FORM}")
    return _plan_class(found, {**kwargs, **(factory_args or {})})


def _plan_class(found: Class, given: Mapping[str, Any]) -> ProgramPlan:
    method = next((name for name in (RUN, "__call__") if name in found.methods), None)
    if method is None:
        what = "an object" if found.is_instance else "a class"
        raise FormError(f"{found.name} is {what} without run; add run(self, prompt, client)")
    if found.constructor is not None:
        check_call(found.constructor._replace(name=found.name), given, "function.kwargs")
    for name in (SETUP, method, CLOSE):
        if name in found.methods:
            function = found.methods[name]._replace(name=f"{found.name}.{name}")
            _check_call(function, {}, requires_values=name == method)
    return ProgramPlan("class", method, given)


def _check_call(function: Function, kwargs: Mapping[str, Any], *, requires_values: bool = True) -> None:
    shown = function.show()
    if function.positional_only:
        raise FormError(f"{shown} has positional-only parameters, but it is called by keyword; remove the '/'")
    for name in kwargs:
        if not function.accepts(name):
            raise FormError(f"{shown} does not accept {name}; remove it from function.kwargs, or add the parameter")
    unknown = [name for name in function.required if name not in {*VALUES, *kwargs}]
    if HTTP_CLIENT in unknown:
        raise FormError(f"{shown} requires {HTTP_CLIENT}, which is not passed; write {HTTP_CLIENT}=None")
    if unknown and requires_values and not set(function.named) & {*VALUES}:  # else they may be columns
        near = difflib.get_close_matches(unknown[0], VALUES, n=1)
        remedy = f"rename {unknown[0]} to {near[0]}" if near else f"write {_FORM}"
        passed = f"passed are {', '.join(VALUES)}; {remedy} (other parameters are columns of the data)"
        raise FormError(f"{shown} requires {unknown[0]}; {passed}")


def describe_missing_program(entrypoint: str | None, defined: Sequence[str]) -> str:
    """Return why a source has no program. `defined`: the names of its functions and classes."""
    found = f"it defines {', '.join(defined)}" if defined else "it defines no function"
    if entrypoint is not None:
        return describe_wrong_entrypoint(entrypoint, defined, found)
    near = difflib.get_close_matches(RUN, defined, n=1)
    named = f"set function.entrypoint: {near[0] if near else defined[0]}, or " if defined else ""
    return (
        f"neither run nor a class with run was found ({found}); {named}write\n"
        "    def run(prompt, client):\n"
        '        answer = client.chat.completions.create(model="policy", messages=prompt)'
    )


def describe_missing_environment(entrypoint: str | None, framework: str, defined: Sequence[str]) -> str:
    """Return why a source has no environment of a framework."""
    if entrypoint is not None:
        return describe_missing_program(entrypoint, defined)
    found = f"it defines {', '.join(defined)}" if defined else "it defines no class"
    return f"no environment of {framework} was found ({found}); set function.entrypoint to its class or function"
