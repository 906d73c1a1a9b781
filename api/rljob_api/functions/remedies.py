"""Messages for functions that cannot be called: what is wrong, and the lines or fields that adapt them."""

import ast
import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from rljob_api.functions.conventions import Convention
from rljob_api.functions.descriptions import DEFAULT_ENTRYPOINTS, SCORER_METHODS, Function
from rljob_api.phrases import did_you_mean

_NEAR: Final = 0.85
"""Likeness of a misspelt name, from 0 to 1: a letter or two of a long one."""


def find_training(source: str) -> tuple[int, str] | None:
    """Return the line at which an import of the source would train, and what to move; None if it does not. The source
    is valid Python."""
    module = ast.parse(source.removeprefix("\ufeff"))
    kept = re.compile(r"(async )?(def|class|@)|if .*__main__")
    statements = [each for each in module.body if not kept.match(ast.unparse(each))]
    calls = [call for each in statements for call in ast.walk(each) if isinstance(call, ast.Call)]
    called = [(call.lineno, ast.unparse(call.func).rpartition(".")[2]) for call in calls]
    lines = [line for line, name in called if name == "train"]
    if not lines or not any(name.endswith("Trainer") for _, name in called):
        return None
    names = ", ".join(node.name for node in module.body if isinstance(node, ast.FunctionDef)) or "the functions"
    return min(lines), (
        f"the import would train, in the reward's server: move {names}, with the imports and constants that they use, "
        "to a file of their own"
    )


def describe_missing_entrypoint(
    entrypoint: str | None,
    scope: str,
    functions: Sequence[str],
    classes: Mapping[str, Iterable[str]],
    scorers: Sequence[str] = (),
) -> str:
    """Return why a source has no entry point. `classes`: the names of their methods. `scorers`: what has a form."""
    if scope != "sampleThenGroup":
        of_groups = [name for name, methods in classes.items() if set(SCORER_METHODS) <= set(methods)]
        if entrypoint is None and of_groups and not functions:
            return f"{of_groups[0]} is a class that scores samples and groups; set scope: sampleThenGroup"
    wanted = list(classes) if scope == "sampleThenGroup" else [*functions, *classes]
    kind = "class" if scope == "sampleThenGroup" else "function"
    found = f"it defines {', '.join(wanted)}" if wanted else f"it defines no {kind}"
    if entrypoint is not None:
        return describe_wrong_entrypoint(entrypoint, wanted, found)
    if kind == "class":
        return f"no class with {' and '.join(SCORER_METHODS)} was found ({found}); scope: sampleThenGroup requires one"
    several = f", or for their sum function.entrypoints: [{', '.join(scorers)}]" if len(scorers) > 1 else ""
    return f"none of {', '.join(DEFAULT_ENTRYPOINTS)} was found ({found}); set function.entrypoint{several}"


def describe_wrong_entrypoint(entrypoint: str, defined: Sequence[str], found: str) -> str:
    """Return that a source does not define what function.entrypoint names. `found`: what it defines, as text."""
    remedy = did_you_mean(entrypoint, defined, "correct function.entrypoint")
    return f"the entry point {entrypoint} was not found ({found}); {remedy}"


def describe_missing(shown: str, missing: Sequence[str], convention: Convention) -> str:
    return f"{shown} requires {', '.join(missing)}, which the {convention.name} convention does not pass"


def describe_broken(broken: Mapping[str, str]) -> str:
    """Return the plugins of signatures that cannot be imported; empty if there are none."""
    return "".join(f"; the plugin of {name} cannot be imported: {problem}" for name, problem in broken.items())


def describe_missing_values(
    shown: str, missing: Sequence[str], convention: Convention, columns: Collection[str] | None = None
) -> str:
    """`columns`: of the data; None if unknown."""
    what = describe_missing(shown, missing, convention)
    sources = {name: name for name in missing}
    if columns is not None:
        what += f", and which is not a column of the data; the columns are {', '.join(columns) or 'none'}"
        sources = {name: next(iter(difflib.get_close_matches(name, columns, n=1)), "COLUMN") for name in missing}
    mapped = ", ".join(f"{name}: extra_info.{source}" for name, source in sources.items())
    for name in missing:
        if near := difflib.get_close_matches(name, convention.arguments, n=1, cutoff=_NEAR):
            return f"{what}; rename {name} to {near[0]}, or set function.columns: {{{mapped}}}"
    return f"{what}; add a default, a value in function.kwargs, or function.columns: {{{mapped}}}"


def describe_unknown_form(function: Function, conventions: Iterable[Convention]) -> str:
    """`conventions`: whose parameters a misspelt one may mean."""
    shown = function.show()
    if function.is_opaque:
        return (
            f"{shown} has no named parameters, so its convention is unknown; set function.signature, such as trl, or "
            "add @functools.wraps to its decorator, if it has one"
        )
    problem = f"{shown} does not match a convention of reward functions"
    markers = {marker.partition(":")[0] for convention in conventions for marker in convention.markers}
    for name in function.named:
        for near in difflib.get_close_matches(name, markers, n=1, cutoff=_NEAR):
            if near.removesuffix("s") != name.removesuffix("s"):  # a plural is another form
                return f"{problem}; rename {name} to {near} if that is meant"
    return (
        f"{problem} (docs/adapters.md has those of AReaL, EasyR1 and others); map its parameters, such as "
        "function.columns: {PARAMETER: completion, OTHER: ground_truth}, or write a function of response, ground_truth "
        "and extra_info that calls it"
    )
