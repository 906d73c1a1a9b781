"""Decides how a simulated user is called: `respond`, or a class in the form of a plugin.

The static check describes source text, a worker the loaded object; both decide here. Pure, standard library only.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from rljob_api.functions.conventions import Signatures, UserForm
from rljob_api.functions.descriptions import Class, Description, Function, Several, Unknown
from rljob_api.functions.forms import FormError, check_call
from rljob_api.functions.remedies import describe_wrong_entrypoint

RESPOND: Final = "respond"
"""The default entry point; and the method of a class."""

VALUES: Final = (
    "messages", "state", "turn", "episode", "prompt", "ground_truth", "answer", "data_source", "extra_info",
)  # fmt: skip
"""What `respond` may take, by name; any other parameter is a column of the data."""

_FORM: Final = "def respond(messages, state): ..."
_REPLY: Final = "(text or None, reward or None, info)"


class UserSpec(NamedTuple):
    """The settings that decide how it is called; FunctionReward has the same fields."""

    entrypoint: str | None = None
    kwargs: Mapping[str, Any] = {}
    factory_args: Mapping[str, Any] | None = None


class UserPlan(NamedTuple):
    """How to use an entry point."""

    kind: Literal["function", "class", "plugin", "unknown"]
    """function: call it. class: call its method. plugin: `form` says how. unknown: only running the source shows it."""
    method: str = ""
    """Name of the method to call, for kind class."""
    arguments: Mapping[str, Any] = {}
    """Arguments of the constructor, for a class."""
    form: UserForm | None = None
    """Form of kind plugin."""


def is_user_class(methods: Mapping[str, object] | Sequence[str], known: Signatures) -> bool:
    """Return whether a class with these methods is a simulated user."""
    return any(method in methods for method in _methods(known))


def _methods(known: Signatures) -> list[str]:
    return [RESPOND, *(form.method for form in known.users)]


def plan_user(
    found: Description,
    kwargs: Mapping[str, Any],
    factory_args: Mapping[str, Any] | None,
    known: Signatures,
    columns: Collection[str] | None = None,
) -> UserPlan:
    """Return how to call it. Raise FormError, with the fix, if it is not a simulated user. `columns`: of the data,
    besides the prompt and the answer, if they are known."""
    if isinstance(found, Unknown):
        return UserPlan("unknown")
    if isinstance(found, Function):
        _check_respond(found, kwargs, columns)
        return UserPlan("function")
    if not isinstance(found, Class):
        what = "a list" if isinstance(found, Several) else f"a {found.what}"
        raise FormError(f"{found.name} is {what}; set function.entrypoint to a function or a class, such as {_FORM}")
    return _plan_class(found, {**kwargs, **(factory_args or {})}, known, columns)


def _plan_class(found: Class, given: Mapping[str, Any], known: Signatures, columns: Collection[str] | None) -> UserPlan:
    method = next((name for name in (*_methods(known), "__call__") if name in found.methods), None)
    if method is None:
        if found.is_open:
            return UserPlan("unknown")
        what = "an object" if found.is_instance else "a class"
        raise FormError(
            f"{found.name} is {what} without respond; add respond(self, messages, state), which returns {_REPLY}"
        )
    form = next((form for form in known.users if form.method == method), None)
    if found.constructor is not None:
        if form and form.config_parameter in found.constructor.named and form.config_parameter not in given:
            given = {form.config_parameter: given}
        check_call(found.constructor._replace(name=found.name), given, "function.kwargs")
    function = found.methods[method]._replace(name=f"{found.name}.{method}")
    if form is not None:
        form.check(function)
        return UserPlan("plugin", "", given, form)
    _check_respond(function, {}, columns)
    return UserPlan("class", method, given)


def _check_respond(function: Function, kwargs: Mapping[str, Any], columns: Collection[str] | None) -> None:
    shown = function.show()
    if function.positional_only:
        raise FormError(f"{shown} has positional-only parameters, but it is called by keyword; remove the '/'")
    for name in kwargs:
        if not function.accepts(name):
            raise FormError(f"{shown} does not accept {name}; remove it from function.kwargs, or add the parameter")
    unknown = [name for name in function.required if name not in {*VALUES, *kwargs}]
    if columns is not None:
        _check_columns(shown, [name for name in unknown if name not in columns], columns)
        return
    if function.var_keyword or not function.named or set(function.named) & {*VALUES}:
        return  # the others may be columns
    if unknown:
        near = difflib.get_close_matches(unknown[0], VALUES, n=1)
        remedy = f"rename {unknown[0]} to {near[0]}" if near else f"write {_FORM}"
        raise FormError(
            f"{shown} takes none of {', '.join(VALUES)}, which are passed by name; {remedy} (other parameters are "
            "columns of the data)"
        )


def _check_columns(shown: str, missing: Sequence[str], columns: Collection[str]) -> None:
    if not missing:
        return
    near = difflib.get_close_matches(missing[0], [*VALUES, *columns], n=1)
    remedy = f"rename {missing[0]} to {near[0]}" if near else f"write {_FORM}"
    found = f"and the columns of the data ({', '.join(columns) or 'none'})"
    raise FormError(f"{shown} requires {', '.join(missing)}; passed are {', '.join(VALUES)} {found}; {remedy}")


def describe_missing_user(entrypoint: str | None, defined: Sequence[str], known: Signatures) -> str:
    """Return why a source has no simulated user. `defined`: the names of its functions and classes."""
    found = f"it defines {', '.join(defined)}" if defined else "it defines no function"
    if entrypoint is not None:
        return describe_wrong_entrypoint(entrypoint, defined, found)
    near = difflib.get_close_matches(RESPOND, defined, n=1)
    named = f"set function.entrypoint: {near[0] if near else defined[0]}, or " if defined else ""
    return (
        f"neither respond nor a class with {' or '.join(_methods(known))} was found ({found}); {named}write\n"
        f"    def respond(messages, state):\n"
        f"        return {_REPLY.strip('()').replace(' or None', '')}"
    )
