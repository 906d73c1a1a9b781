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
from typing import Final, Literal, NamedTuple

from rljob_api.manifest.reward import FunctionReward, Scope

Convention = Literal["verl", "trl", "openrlhf"]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

DEFAULT_ENTRYPOINTS: Final = ("compute_score", "reward_func", "reward")
"""Where function.entrypoint is null, the first of these that the source defines."""

CLASS_METHODS: Final = ("compute_score", "post_process_scores")
"""What a class has that scores samples first and then their group."""


class SignatureVariant(NamedTuple):
    """One way in which a convention calls a function."""

    convention: Convention
    marker: str
    """The parameter that no other variant has."""
    arguments: tuple[str, ...]
    """What is passed, by keyword. TRL passes every column of the data besides."""
    takes_groups: bool
    """Whether arguments are lists, of one element for each sample."""


SIGNATURE_VARIANTS: Final = (
    SignatureVariant("verl", "solution_str", ("data_source", "solution_str", "ground_truth", "extra_info"), False),
    SignatureVariant("verl", "solution_strs", ("data_sources", "solution_strs", "ground_truths", "extra_infos"), True),
    SignatureVariant("trl", "completions", ("prompts", "completions"), True),
    SignatureVariant("openrlhf", "queries", ("queries", "prompts", "labels"), True),
)

_EXPECTED: Final = (
    "verl (data_source, solution_str, ground_truth, extra_info), "
    "TRL (prompts, completions, **columns) or OpenRLHF (queries, prompts, labels)"
)
_EXPECTED_OF_GROUPS: Final = (
    "verl (data_sources, solution_strs, ground_truths, extra_infos), "
    "TRL (prompts, completions, **columns) or OpenRLHF (queries, prompts, labels)"
)


def detect_signature_variant(parameter_names: Iterable[str]) -> SignatureVariant | None:
    """The variant of a function with these parameters; None when they fit none, or more than one."""
    names = set(parameter_names)
    fits = [variant for variant in SIGNATURE_VARIANTS if variant.marker in names]
    return fits[0] if len(fits) == 1 else None


def check_function(source: str, filename: str, spec: FunctionReward, scope: Scope = "sample") -> list[str]:
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
    find = _find_class if scope == "sampleThenGroup" else _find_entrypoint
    name = find(defined, spec.entrypoint)
    if name is None:
        # After `from x import *` any name may be there; the reward server will see.
        return [] if "*" in defined else [f"{filename}:1: {_missing_entrypoint(defined, spec.entrypoint, scope)}"]
    node = defined[name]
    return [f"{filename}:{node.lineno}: {problem}" for problem in _entrypoint_problems(name, node, spec, scope)]


def _entrypoint_problems(name: str, node: ast.stmt, spec: FunctionReward, scope: Scope) -> Iterator[str]:
    if isinstance(node, FunctionNode) and scope != "sampleThenGroup":
        yield from _signature_problems(node, spec, scope)
    elif isinstance(node, ast.ClassDef) and scope == "sampleThenGroup":
        missing = [method for method in CLASS_METHODS if method not in _methods(node)]
        if missing and not node.bases:
            yield f"the class {name} has no {' and no '.join(missing)}, which scope: sampleThenGroup needs"
    elif isinstance(node, ast.ClassDef):
        yield (
            f"{name} is a class; the entry point of a reward must be a function, save with scope: sampleThenGroup, "
            f"where it is a class with {' and '.join(CLASS_METHODS)}"
        )
    elif isinstance(node, FunctionNode):
        yield f"{name} is a function; scope: sampleThenGroup needs a class with {' and '.join(CLASS_METHODS)}"


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


def _find_class(defined: dict[str, ast.stmt], entrypoint: str | None) -> str | None:
    if entrypoint:
        return entrypoint if entrypoint in defined else None
    classes = [(name, node) for name, node in defined.items() if isinstance(node, ast.ClassDef)]
    whole = [name for name, node in classes if _methods(node).issuperset(CLASS_METHODS)]
    # What a class inherits is not known here; the reward server will see.
    return next(iter(whole or [name for name, node in classes if node.bases]), None)


def _methods(node: ast.ClassDef) -> set[str]:
    return {name for statement in _statements(node.body) for name in _bound_names(statement)}


def _missing_entrypoint(defined: dict[str, ast.stmt], entrypoint: str | None, scope: Scope) -> str:
    wanted: tuple[type[ast.stmt], ...] = (ast.FunctionDef, ast.AsyncFunctionDef)
    kind = "function"
    if scope == "sampleThenGroup":
        wanted, kind = (ast.ClassDef,), "class"
    names = [name for name, node in defined.items() if isinstance(node, wanted)]
    found = f"it defines {', '.join(names)}" if names else f"it defines no {kind}"
    if entrypoint is not None:
        near = difflib.get_close_matches(entrypoint, names, n=1)
        remedy = f"did you mean {near[0]}?" if near else "correct function.entrypoint"
        return f"the entry point {entrypoint} is not there ({found}); {remedy}"
    if kind == "class":
        return f"no class with {' and '.join(CLASS_METHODS)} is there ({found}), which scope: sampleThenGroup needs"
    return f"none of {', '.join(DEFAULT_ENTRYPOINTS)} is there ({found}); name yours in function.entrypoint"


def _signature_problems(node: FunctionNode, spec: FunctionReward, scope: Scope) -> Iterator[str]:
    arguments = node.args
    keyword_parameters = [parameter.arg for parameter in (*arguments.args, *arguments.kwonlyargs)]
    shown = f"{node.name}({_show_parameters(arguments)})"
    if arguments.posonlyargs:
        yield f"{shown} has positional-only parameters, but rewards are called by keyword; remove the '/'"
        return
    expected = _EXPECTED_OF_GROUPS if scope == "group" else _EXPECTED
    variant = _choose_variant(keyword_parameters, spec, scope)
    if variant is None:
        yield f"{shown} fits no convention of reward functions; rename its parameters to those of {expected}"
        return
    # A function that takes **kwargs takes the mark, too: with an explicit signature that is enough.
    if variant.marker not in keyword_parameters and arguments.kwarg is None:
        passed_names = ", ".join(variant.arguments)
        yield f"{shown} is not of the signature {variant.convention} that is asked for: that passes ({passed_names})"
        return
    if scope == "group" and not variant.takes_groups:
        yield f"{shown} takes one sample, but scope: group passes lists; write one of {expected}, or remove scope"
        return
    unknown = [name for name in spec.kwargs if name not in keyword_parameters and arguments.kwarg is None]
    if unknown:
        yield f"{shown} does not take {', '.join(unknown)}; remove that from function.kwargs, or add the parameter"
    if variant.convention == "trl":
        return  # further parameters are columns of the data
    passed = {*variant.arguments, *spec.kwargs}
    missing = [name for name in _required(arguments) if name not in passed]
    if missing:
        yield (
            f"{shown} requires {', '.join(missing)}, which {variant.convention}'s convention does not pass; "
            "give it a default, or a value in function.kwargs"
        )


def _choose_variant(parameter_names: list[str], spec: FunctionReward, scope: Scope) -> SignatureVariant | None:
    """By the parameters; of a signature that is asked for, the variant with a mark among them, or the usual one."""
    if spec.signature == "auto":
        return detect_signature_variant(parameter_names)
    variants = [variant for variant in SIGNATURE_VARIANTS if variant.convention == spec.signature]
    marked = [variant for variant in variants if variant.marker in parameter_names]
    return next(iter(marked), None) or next(variant for variant in variants if variant.takes_groups or scope != "group")


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
