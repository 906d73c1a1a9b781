"""Decides whether the policy can call a function: its parameters must have names, by which it calls it.

A worker describes the loaded function. Pure, standard library only.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from rljob_api.functions.descriptions import Class, Description, Function, Other, Several
from rljob_api.functions.forms import FormError
from rljob_api.functions.remedies import describe_wrong_entrypoint
from rljob_api.phrases import did_you_mean

TOOLS: Final = "tools"
"""A list of functions that the source may define. Without it, every public function is a tool."""
MAX_NAME_CHARACTERS: Final = 64


def is_public(name: str) -> bool:
    return not name.startswith("_")


def check_tool(function: Function) -> None:
    """Raise FormError if the policy cannot call it, whatever the types of its parameters."""
    if len(function.name) > MAX_NAME_CHARACTERS:
        raise FormError(f"{function.name}: a tool's name must have at most {MAX_NAME_CHARACTERS} characters; rename it")
    if not function.name.isidentifier():
        raise FormError(f"{function.name} has no name, by which the model calls it; write a function with def")
    shown = function.show()
    if function.is_opaque:
        raise FormError(
            f"{shown} has no named parameters, which the model must see; name them, or add @functools.wraps to its "
            "decorator"
        )
    if function.positional_only:
        raise FormError(f"{shown} has positional-only parameters, but tools are called by keyword; remove the '/'")
    if function.var_positional or function.var_keyword:
        raise FormError(f"{shown}: the model must see each parameter; replace * and ** by names with types")


def list_methods(found: Class) -> list[Function]:
    """Return the public methods of a class, which are tools. Raise FormError if it has none."""
    methods = [method for name, method in found.methods.items() if is_public(name) and not method.is_opaque]
    if not methods:
        what = "an object" if found.is_instance else "a class"
        raise FormError(f"{found.name} is {what} without public methods; add some, or set function.entrypoint")
    return methods


def list_elements(found: Description) -> list[Description]:
    """Return what an entry point names: itself, or the elements of a list. Raise FormError if it cannot be a tool."""
    if isinstance(found, Other):
        raise FormError(
            f"{found.name} is a {found.what}; set function.entrypoint to a function, a class, an object, or a list of "
            "functions"
        )
    if not isinstance(found, Several):
        return [found]
    if not found.elements:
        raise FormError(f"{found.name} is an empty list; add functions to it")
    return [each for element in found.elements for each in list_elements(element)]


def check_kwargs(functions: Iterable[Function], given: Mapping[str, Any]) -> None:
    """Raise FormError if function.kwargs has a name that no function takes."""
    taken = [name for function in functions for name in function.named]
    for name in given:
        if name not in taken:
            remedy = did_you_mean(name, taken, "remove it from function.kwargs")
            raise FormError(f"no tool takes {name} ({', '.join(taken) or 'they have no parameters'}); {remedy}")


def check_unique(names: Iterable[str]) -> None:
    seen = set[str]()
    for name in names:
        if name in seen:
            raise FormError(f"two tools are named {name}, by which the model calls them; rename one")
        seen.add(name)


def describe_missing_tools(entrypoint: str | None, defined: Iterable[str]) -> str:
    """Return why a source has no tools. `defined`: the names of its functions, classes and lists."""
    names = list(defined)
    found = f"it defines {', '.join(names)}" if names else "it defines none"
    if entrypoint is None:
        return f"no public function was found ({found}); define one with typed parameters, or set function.entrypoint"
    return describe_wrong_entrypoint(entrypoint, names, found)
