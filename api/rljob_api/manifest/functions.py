"""Check a reward function without running it: syntax, entry point and signature.

The reward server applies the same rules to the loaded function, and calls it by keyword with the arguments that it
accepts. Invariant: user code is never executed, and what parsing cannot determine (an imported name) is not reported.
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
"""If function.entrypoint is null, the first of these that the source defines."""

CLASS_METHODS: Final = ("compute_score", "post_process_scores")
"""Methods of a class for scope: sampleThenGroup."""


class SignatureVariant(NamedTuple):
    """One way in which a convention calls a function."""

    convention: Convention
    marker: str
    """The parameter that identifies the variant."""
    arguments: tuple[str, ...]
    """Keyword arguments. TRL additionally passes all columns of the data."""
    takes_groups: bool
    """Whether arguments are lists with one element per sample."""


SIGNATURE_VARIANTS: Final = (
    SignatureVariant("verl", "solution_str", ("data_source", "solution_str", "ground_truth", "extra_info"), False),
    SignatureVariant("verl", "solution_strs", ("data_sources", "solution_strs", "ground_truths", "extra_infos"), True),
    SignatureVariant("trl", "completions", ("prompts", "completions"), True),
    SignatureVariant("openrlhf", "queries", ("queries", "prompts", "labels"), True),
)


def check_function(source: str, filename: str, spec: FunctionReward, scope: Scope = "sample") -> list[str]:
    """Return the problems of a reward function's source, each beginning with `filename:line:`."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source, filename)
    except SyntaxError as error:
        return [f"{filename}:{error.lineno or 1}: the reward function has a syntax error: {error.msg}"]
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deeply
        return [f"{filename}: the reward function cannot be parsed: {error}"]
    # The last statement that binds each name; "*" for a star import.
    defined = {name: statement for statement in _statements(tree) for name in _bound_names(statement)}
    name = _find_entrypoint(defined, spec.entrypoint, scope)
    if name is None:
        # `from x import *` may define any name; the reward server checks it.
        return [] if "*" in defined else [f"{filename}:1: {_missing_entrypoint(defined, spec.entrypoint, scope)}"]
    node = defined[name]
    return [f"{filename}:{node.lineno}: {problem}" for problem in _entrypoint_problems(name, node, spec, scope)]


def _entrypoint_problems(name: str, node: ast.stmt, spec: FunctionReward, scope: Scope) -> Iterator[str]:
    required_class = f"a class with {' and '.join(CLASS_METHODS)}"
    if isinstance(node, FunctionNode):
        if scope == "sampleThenGroup":
            yield f"{name} is a function; scope: sampleThenGroup requires {required_class}"
        else:
            yield from _signature_problems(node, spec, scope)
    elif isinstance(node, ast.ClassDef):
        missing = [method for method in CLASS_METHODS if method not in _methods(node)]
        if scope != "sampleThenGroup":
            yield (
                f"{name} is a class; the entry point must be a function, except with scope: sampleThenGroup, "
                f"which requires {required_class}"
            )
        elif missing and not node.bases:
            yield f"the class {name} has no {' and no '.join(missing)}, which scope: sampleThenGroup requires"


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, including those inside if, try and with."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, FunctionNode | ast.ClassDef):
            yield from _statements(node)


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, FunctionNode | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
        yield from (node.id for node in names if isinstance(node.ctx, ast.Store))


def _find_entrypoint(defined: dict[str, ast.stmt], entrypoint: str | None, scope: Scope) -> str | None:
    candidates: Iterable[str] = DEFAULT_ENTRYPOINTS
    if entrypoint:
        candidates = (entrypoint,)
    elif scope == "sampleThenGroup":
        classes = {name: node for name, node in defined.items() if isinstance(node, ast.ClassDef)}
        complete = (name for name, node in classes.items() if _methods(node).issuperset(CLASS_METHODS))
        # Inherited methods are unknown here; the reward server checks them.
        candidates = (*complete, *(name for name, node in classes.items() if node.bases))
    return next((name for name in candidates if name in defined), None)


def _methods(node: ast.ClassDef) -> set[str]:
    return {name for statement in _statements(node) for name in _bound_names(statement)}


def _missing_entrypoint(defined: dict[str, ast.stmt], entrypoint: str | None, scope: Scope) -> str:
    kind = "class" if scope == "sampleThenGroup" else "function"
    wanted = ast.ClassDef if kind == "class" else FunctionNode
    names = [name for name, node in defined.items() if isinstance(node, wanted)]
    found = f"it defines {', '.join(names)}" if names else f"it defines no {kind}"
    if entrypoint is not None:
        near = difflib.get_close_matches(entrypoint, names, n=1)
        remedy = f"did you mean {near[0]}?" if near else "correct function.entrypoint"
        return f"the entry point {entrypoint} was not found ({found}); {remedy}"
    if kind == "class":
        return f"no class with {' and '.join(CLASS_METHODS)} was found ({found}); scope: sampleThenGroup requires one"
    return f"none of {', '.join(DEFAULT_ENTRYPOINTS)} was found ({found}); set function.entrypoint"


def _signature_problems(node: FunctionNode, spec: FunctionReward, scope: Scope) -> Iterator[str]:
    arguments = node.args
    keyword_parameters = [parameter.arg for parameter in (*arguments.args, *arguments.kwonlyargs)]
    shown = f"{node.name}({_show_parameters(arguments)})"
    if arguments.posonlyargs:
        yield f"{shown} has positional-only parameters, but rewards are called by keyword; remove the '/'"
        return
    verl = next(v for v in SIGNATURE_VARIANTS if v.convention == "verl" and v.takes_groups == (scope == "group"))
    expected = (
        f"verl ({', '.join(verl.arguments)}), "
        "TRL (prompts, completions, **columns) or OpenRLHF (queries, prompts, labels)"
    )
    variant = _choose_variant(keyword_parameters, spec, scope)
    if variant is None:
        yield f"{shown} does not match a convention of reward functions; rename its parameters to those of {expected}"
        return
    # With an explicit signature, a function with **kwargs accepts the marker, too.
    if variant.marker not in keyword_parameters and arguments.kwarg is None:
        passed = ", ".join(variant.arguments)
        yield f"{shown} does not match signature: {variant.convention}, which passes ({passed})"
        return
    if scope == "group" and not variant.takes_groups:
        yield f"{shown} takes one sample, but scope: group passes lists; use one of {expected}, or remove scope"
        return
    unknown = [name for name in spec.kwargs if name not in keyword_parameters and arguments.kwarg is None]
    if unknown:
        yield f"{shown} does not accept {', '.join(unknown)}; remove it from function.kwargs, or add the parameter"
    if variant.convention == "trl":
        return  # other parameters are columns of the data
    missing = [name for name in _required(arguments) if name not in (*variant.arguments, *spec.kwargs)]
    if missing:
        yield (
            f"{shown} requires {', '.join(missing)}, which the {variant.convention} convention does not pass; "
            "add a default, or a value in function.kwargs"
        )


def _choose_variant(parameter_names: list[str], spec: FunctionReward, scope: Scope) -> SignatureVariant | None:
    """Return the only variant with a marker; with an explicit signature, its first with one, else its default."""
    marked = [variant for variant in SIGNATURE_VARIANTS if variant.marker in parameter_names]
    if spec.signature == "auto":
        return marked[0] if len(marked) == 1 else None
    variants = [variant for variant in SIGNATURE_VARIANTS if variant.convention == spec.signature]
    fitting = [variant for variant in variants if variant.takes_groups or scope != "group"]
    return next((variant for variant in variants if variant in marked), fitting[0])


def _required(arguments: ast.arguments) -> list[str]:
    positional = arguments.args[: len(arguments.args) - len(arguments.defaults)]
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required = positional + [parameter for parameter, default in keyword_only if default is None]
    return [parameter.arg for parameter in required]


def _show_parameters(arguments: ast.arguments) -> str:
    shown = [parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args)]
    shown += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    shown += [parameter.arg for parameter in arguments.kwonlyargs]
    shown += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return ", ".join(shown)
