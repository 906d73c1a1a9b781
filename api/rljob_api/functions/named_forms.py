"""Decides how functions of agents are called by parameter names: a program, `run`, and a simulated user, `respond`; or
a class with such a method.

A worker describes the loaded object. Pure, standard library only.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from rljob_api.functions.descriptions import Class, Description, Function, Several
from rljob_api.functions.forms import FormError, check_call
from rljob_api.functions.remedies import describe_wrong_entrypoint

RUN: Final = "run"
"""The default entry point of programs; and the method of a class."""
SETUP: Final = "setup"
"""Method of a program's class, called before each episode."""
CLOSE: Final = "close"
"""Method of a program's class, called after each episode, however it ended."""
CLIENT: Final = "client"
"""The parameter that gets an OpenAI client."""
HTTP_CLIENT: Final = "http_client"
"""What some projects pass besides: their programs do without it."""
RESPOND: Final = "respond"
"""The default entry point of simulated users; and the method of a class."""

PROGRAM_VALUES: Final = (
    "prompt", "messages", "question", "answer", "ground_truth", "data_source", "extra_info", "task", "data", "example",
    "base_url", "api_key", "model", CLIENT, "seed", "attempt", "episode", "max_turns",
)  # fmt: skip
"""What `run` may take, by name; any other parameter is a column of the data."""
USER_VALUES: Final = (
    "messages", "state", "turn", "episode", "prompt", "ground_truth", "answer", "data_source", "extra_info",
)  # fmt: skip
"""What `respond` may take, by name; any other parameter is a column of the data."""


class _Form(NamedTuple):
    name: str
    values: Sequence[str]
    parameters: str
    """Those that a short example has."""
    returns: str
    """What it returns, after a comma; empty: anything."""
    body: str


_PROGRAM: Final = _Form(
    RUN,
    PROGRAM_VALUES,
    f"prompt, {CLIENT}",
    "",
    'answer = client.chat.completions.create(model="policy", messages=prompt)',
)
_USER: Final = _Form(
    RESPOND,
    USER_VALUES,
    "messages, state",
    ", which returns (text or None, reward or None, info)",
    "return text, reward, info",
)


class CallPlan(NamedTuple):
    """How to use an entry point."""

    method: str = ""
    """Name of the method to call, of a class. Empty: it is a function."""
    arguments: Mapping[str, Any] = {}
    """Arguments of the constructor, for a class."""


def plan_program(found: Description, kwargs: Mapping[str, Any], factory_args: Mapping[str, Any] | None) -> CallPlan:
    """Return how to call it, or raise FormError with the fix."""
    if isinstance(found, Function):
        _check_run(found, kwargs)
        return CallPlan()
    (found, method), given = _choose_method(_PROGRAM, found), {**kwargs, **(factory_args or {})}
    if found.constructor is not None:
        check_call(found.constructor._replace(name=found.name), given, "function.kwargs")
    for name in (SETUP, method, CLOSE):
        if name in found.methods:
            _check_run(_name_method(found, name), {}, requires_values=name == method)
    return CallPlan(method, given)


def plan_user(found: Description, kwargs: Mapping[str, Any], factory_args: Mapping[str, Any] | None) -> CallPlan:
    """Return how to call it. Raise FormError, with the fix, if it is not a simulated user."""
    if isinstance(found, Function):
        _check_respond(found, kwargs)
        return CallPlan()
    (found, method), given = _choose_method(_USER, found), {**kwargs, **(factory_args or {})}
    if found.constructor is not None:
        check_call(found.constructor._replace(name=found.name), given, "function.kwargs")
    _check_respond(_name_method(found, method), {})
    return CallPlan(method, given)


def _choose_method(form: _Form, found: Description) -> tuple[Class, str]:
    if not isinstance(found, Class):
        what = "a list" if isinstance(found, Several) else f"a {found.what}"  # type: ignore[union-attr]
        remedy = f"set function.entrypoint to a function or a class, such as def {form.name}({form.parameters}): ..."
        raise FormError(f"{found.name} is {what}; {remedy}")
    if method := next((name for name in (form.name, "__call__") if name in found.methods), None):
        return found, method
    what = "an object" if found.is_instance else "a class"
    raise FormError(
        f"{found.name} is {what} without {form.name}; add {form.name}(self, {form.parameters}){form.returns}"
    )


def _name_method(found: Class, method: str) -> Function:
    return found.methods[method]._replace(name=f"{found.name}.{method}")


def _check_run(function: Function, kwargs: Mapping[str, Any], *, requires_values: bool = True) -> None:
    unknown = _list_unknown(_PROGRAM, function, kwargs)
    if HTTP_CLIENT in unknown:
        raise FormError(f"{function.show()} requires {HTTP_CLIENT}, which is not passed; write {HTTP_CLIENT}=None")
    if unknown and requires_values and not set(function.named) & {*PROGRAM_VALUES}:  # else they may be columns
        passed = f"requires {unknown[0]}; passed are {', '.join(PROGRAM_VALUES)}"
        raise FormError(f"{function.show()} {passed}; {_describe_rename(_PROGRAM, unknown[0])}")


def _check_respond(function: Function, kwargs: Mapping[str, Any]) -> None:
    unknown = _list_unknown(_USER, function, kwargs)
    if function.var_keyword or not function.named or set(function.named) & {*USER_VALUES}:
        return  # the others may be columns
    if unknown:
        passed = f"takes none of {', '.join(USER_VALUES)}, which are passed by name"
        raise FormError(f"{function.show()} {passed}; {_describe_rename(_USER, unknown[0])}")


def _list_unknown(form: _Form, function: Function, kwargs: Mapping[str, Any]) -> list[str]:
    """Return what it requires, and is not passed. Raise FormError if it cannot be called by keyword."""
    shown = function.show()
    if function.positional_only:
        raise FormError(f"{shown} has positional-only parameters, but it is called by keyword; remove the '/'")
    for name in kwargs:
        if not function.accepts(name):
            raise FormError(f"{shown} does not accept {name}; remove it from function.kwargs, or add the parameter")
    return [name for name in function.required if name not in {*form.values, *kwargs}]


def _describe_rename(form: _Form, name: str) -> str:
    near = difflib.get_close_matches(name, form.values, n=1)
    remedy = f"rename {name} to {near[0]}" if near else f"write def {form.name}({form.parameters}): ..."
    return f"{remedy} (other parameters are columns of the data)"


def describe_missing_program(entrypoint: str | None, defined: Sequence[str]) -> str:
    """Return why a source has no program. `defined`: the names of its functions and classes."""
    return _describe_missing(_PROGRAM, entrypoint, defined)


def describe_missing_user(entrypoint: str | None, defined: Sequence[str]) -> str:
    """Return why a source has no simulated user. `defined`: the names of its functions and classes."""
    return _describe_missing(_USER, entrypoint, defined)


def _describe_missing(form: _Form, entrypoint: str | None, defined: Sequence[str]) -> str:
    found = f"it defines {', '.join(defined)}" if defined else "it defines no function"
    if entrypoint is not None:
        return describe_wrong_entrypoint(entrypoint, defined, found)
    near = difflib.get_close_matches(form.name, defined, n=1)
    named = f"set function.entrypoint: {near[0] if near else defined[0]}, or " if defined else ""
    return (
        f"neither {form.name} nor a class with {form.name} was found ({found}); {named}write\n"
        f"    def {form.name}({form.parameters}):\n        {form.body}"
    )


def describe_missing_environment(entrypoint: str | None, framework: str, defined: Sequence[str]) -> str:
    """Return why a source has no environment of a framework."""
    if entrypoint is not None:
        return describe_missing_program(entrypoint, defined)
    found = f"it defines {', '.join(defined)}" if defined else "it defines no class"
    return f"no environment of {framework} was found ({found}); set function.entrypoint to its class or function"
