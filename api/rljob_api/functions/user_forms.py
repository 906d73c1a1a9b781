"""Decides how a simulated user is called: `respond`, or a class in the form of a plugin.

A worker describes the loaded object. Pure, standard library only.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from rljob_api.functions.conventions import Signatures, UserForm
from rljob_api.functions.descriptions import Class, Description, Function, Several
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


class UserPlan(NamedTuple):
    """How to use an entry point."""

    kind: Literal["function", "class", "plugin"]
    """function: call it. class: call its method. plugin: `form` says how."""
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
) -> UserPlan:
    """Return how to call it. Raise FormError, with the fix, if it is not a simulated user."""
    if isinstance(found, Function):
        _check_respond(found, kwargs)
        return UserPlan("function")
    if not isinstance(found, Class):
        what = "a list" if isinstance(found, Several) else f"a {found.what}"
        raise FormError(f"{found.name} is {what}; set function.entrypoint to a function or a class, such as {_FORM}")
    return _plan_class(found, {**kwargs, **(factory_args or {})}, known)


def _plan_class(found: Class, given: Mapping[str, Any], known: Signatures) -> UserPlan:
    method = next((name for name in (*_methods(known), "__call__") if name in found.methods), None)
    if method is None:
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
    _check_respond(function, {})
    return UserPlan("class", method, given)


def _check_respond(function: Function, kwargs: Mapping[str, Any]) -> None:
    shown = function.show()
    if function.positional_only:
        raise FormError(f"{shown} has positional-only parameters, but it is called by keyword; remove the '/'")
    for name in kwargs:
        if not function.accepts(name):
            raise FormError(f"{shown} does not accept {name}; remove it from function.kwargs, or add the parameter")
    unknown = [name for name in function.required if name not in {*VALUES, *kwargs}]
    if function.var_keyword or not function.named or set(function.named) & {*VALUES}:
        return  # the others may be columns
    if unknown:
        near = difflib.get_close_matches(unknown[0], VALUES, n=1)
        remedy = f"rename {unknown[0]} to {near[0]}" if near else f"write {_FORM}"
        raise FormError(
            f"{shown} takes none of {', '.join(VALUES)}, which are passed by name; {remedy} (other parameters are "
            "columns of the data)"
        )


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
