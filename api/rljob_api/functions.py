"""What can be said of a reward function without running it: its syntax, its entry point, its signature.

Owns the rules by which a convention is told from parameter names; the reward server applies the same ones to the live
function. Every convention is called by keyword, with those of its arguments that the function takes. Invariant: user
code is parsed here, never executed, and what cannot be known by reading (an imported name) is no problem.
"""

from __future__ import annotations

import ast
import difflib
import warnings
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from rljob_api.reward import FunctionReward

Convention = Literal["verl", "trl", "openrlhf"]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

DEFAULT_ENTRYPOINTS: Final = ("compute_score", "reward_func", "reward")
"""Where function.entrypoint is null, the first of these that the source defines."""

CONVENTION_ARGUMENTS: Final[dict[Convention, tuple[str, ...]]] = {
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "trl": ("prompts", "completions"),
    "openrlhf": ("queries", "prompts", "labels"),
}
"""What each convention passes, by keyword. TRL passes every column of the data besides."""

_MARKS: Final[dict[Convention, str]] = {"verl": "solution_str", "trl": "completions", "openrlhf": "queries"}
"""The parameter that no other convention has."""

_EXPECTED: Final = (
    "verl (data_source, solution_str, ground_truth, extra_info), "
    "TRL (prompts, completions, **columns) or OpenRLHF (queries, prompts, labels)"
)


def detect_signature(parameter_names: Iterable[str]) -> Convention | None:
    """The convention of a function with these parameters; None when they fit no convention, or more than one."""
    names = set(parameter_names)
    fits: list[Convention] = [convention for convention, mark in _MARKS.items() if mark in names]
    return fits[0] if len(fits) == 1 else None


def check_function(source: str, filename: str, spec: FunctionReward) -> list[str]:
    """Problems of a reward function's source, each beginning with `filename:line:`. Empty when none can be seen."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source, filename)
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        return [f"{filename}{line}: the reward function has a syntax error: {error.msg}"]
    except (ValueError, RecursionError, MemoryError) as error:
        return [f"{filename}: the reward function cannot be parsed: {error}"]
    defined = _top_level_names(tree)
    name = _find_entrypoint(defined, spec.entrypoint)
    if name is None:
        # After `from x import *` any name may be there; the reward server will see.
        return [] if "*" in defined else [f"{filename}:1: {_missing_entrypoint(defined, spec.entrypoint)}"]
    node = defined[name]
    if isinstance(node, ast.ClassDef):
        return [f"{filename}:{node.lineno}: {name} is a class; the entry point of a reward must be a function"]
    if not isinstance(node, FunctionNode):
        return []
    return [f"{filename}:{node.lineno}: {problem}" for problem in _signature_problems(node, spec)]


def _top_level_names(tree: ast.Module) -> dict[str, ast.stmt]:
    """Name -> statement that binds it last, at module level; `*` for an import of everything."""
    return {name: statement for statement in _statements(tree.body) for name in _bound_names(statement)}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of the module's own scope, those inside if, try and with included."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, part, []):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, FunctionNode | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _find_entrypoint(defined: dict[str, ast.stmt], entrypoint: str | None) -> str | None:
    candidates = (entrypoint,) if entrypoint else DEFAULT_ENTRYPOINTS
    return next((name for name in candidates if name in defined), None)


def _missing_entrypoint(defined: dict[str, ast.stmt], entrypoint: str | None) -> str:
    functions = [name for name, node in defined.items() if isinstance(node, FunctionNode)]
    found = f"it defines {', '.join(functions)}" if functions else "it defines no function"
    if entrypoint is None:
        return f"none of {', '.join(DEFAULT_ENTRYPOINTS)} is there ({found}); name yours in function.entrypoint"
    near = difflib.get_close_matches(entrypoint, functions, n=1)
    remedy = f"did you mean {near[0]}?" if near else "correct function.entrypoint"
    return f"the entry point {entrypoint} is not there ({found}); {remedy}"


def _signature_problems(node: FunctionNode, spec: FunctionReward) -> Iterator[str]:
    arguments = node.args
    keyword_parameters = [parameter.arg for parameter in (*arguments.args, *arguments.kwonlyargs)]
    shown = f"{node.name}({_show_parameters(arguments)})"
    if arguments.posonlyargs:
        yield f"{shown} has positional-only parameters, but rewards are called by keyword; remove the '/'"
        return
    convention = detect_signature(keyword_parameters) if spec.signature == "auto" else spec.signature
    if convention is None:
        yield f"{shown} fits no convention of reward functions; rename its parameters to those of {_EXPECTED}"
        return
    # A function that takes **kwargs takes the mark, too: with an explicit signature that is enough.
    if _MARKS[convention] not in keyword_parameters and arguments.kwarg is None:
        expected = ", ".join(CONVENTION_ARGUMENTS[convention])
        yield f"{shown} is not of the signature {convention} that is asked for: that passes ({expected})"
        return
    unknown = [name for name in spec.kwargs if name not in keyword_parameters and arguments.kwarg is None]
    if unknown:
        yield f"{shown} does not take {', '.join(unknown)}; remove that from function.kwargs, or add the parameter"
    if convention == "trl":
        return  # further parameters are columns of the data
    passed = {*CONVENTION_ARGUMENTS[convention], *spec.kwargs}
    missing = [name for name in _required(arguments) if name not in passed]
    if missing:
        yield (
            f"{shown} requires {', '.join(missing)}, which {convention}'s convention does not pass; "
            "give it a default, or a value in function.kwargs"
        )


def _required(arguments: ast.arguments) -> list[str]:
    num_without_default = len(arguments.args) - len(arguments.defaults)
    positional = [parameter.arg for parameter in arguments.args[:num_without_default]]
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return positional + [parameter.arg for parameter, default in keyword_only if default is None]


def _show_parameters(arguments: ast.arguments) -> str:
    """Parameter names as written, without annotations and default values."""
    shown = [parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        shown.append(f"*{arguments.vararg.arg}")
    shown += [parameter.arg for parameter in arguments.kwonlyargs]
    if arguments.kwarg:
        shown.append(f"**{arguments.kwarg.arg}")
    return ", ".join(shown)
