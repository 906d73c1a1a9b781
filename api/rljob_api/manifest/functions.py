"""Check a reward function without running it: syntax, entry point and signature.

Defines how a convention is detected from parameter names; the reward server applies the same rules to the loaded
function. Functions are called by keyword, with those arguments of the convention that they accept. Invariant: user code
is parsed, never executed, and what parsing cannot determine (an imported name) is not reported.
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

_EXPECTED: Final = (
    "verl (data_source, solution_str, ground_truth, extra_info), "
    "TRL (prompts, completions, **columns) or OpenRLHF (queries, prompts, labels)"
)
_EXPECTED_OF_GROUPS: Final = (
    "verl (data_sources, solution_strs, ground_truths, extra_infos), "
    "TRL (prompts, completions, **columns) or OpenRLHF (queries, prompts, labels)"
)


def detect_signature_variant(parameter_names: Iterable[str]) -> SignatureVariant | None:
    """Return the variant of a function with these parameters; None if none or several match."""
    names = set(parameter_names)
    matching = [variant for variant in SIGNATURE_VARIANTS if variant.marker in names]
    return matching[0] if len(matching) == 1 else None


def check_function(source: str, filename: str, spec: FunctionReward, scope: Scope = "sample") -> list[str]:
    """Return the problems of a reward function's source, each beginning with `filename:line:`."""
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
        # `from x import *` may define any name; the reward server checks it.
        return [] if "*" in defined else [f"{filename}:1: {_missing_entrypoint(defined, spec.entrypoint, scope)}"]
    node = defined[name]
    return [f"{filename}:{node.lineno}: {problem}" for problem in _entrypoint_problems(name, node, spec, scope)]


def _entrypoint_problems(name: str, node: ast.stmt, spec: FunctionReward, scope: Scope) -> Iterator[str]:
    if isinstance(node, FunctionNode) and scope != "sampleThenGroup":
        yield from _signature_problems(node, spec, scope)
    elif isinstance(node, ast.ClassDef) and scope == "sampleThenGroup":
        missing = [method for method in CLASS_METHODS if method not in _methods(node)]
        if missing and not node.bases:
            yield f"the class {name} has no {' and no '.join(missing)}, which scope: sampleThenGroup requires"
    elif isinstance(node, ast.ClassDef):
        yield (
            f"{name} is a class; the entry point must be a function, except with scope: sampleThenGroup, "
            f"which requires a class with {' and '.join(CLASS_METHODS)}"
        )
    elif isinstance(node, FunctionNode):
        yield f"{name} is a function; scope: sampleThenGroup requires a class with {' and '.join(CLASS_METHODS)}"


def _top_level_names(tree: ast.Module) -> dict[str, ast.stmt]:
    """Return name -> last statement that binds it at module level; `*` for a star import."""
    return {name: statement for statement in _statements(tree.body) for name in _bound_names(statement)}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, including those inside if, try and with."""
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
    complete = [name for name, node in classes if _methods(node).issuperset(CLASS_METHODS)]
    # Inherited methods are unknown here; the reward server checks them.
    return next(iter(complete or [name for name, node in classes if node.bases]), None)


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
    expected = _EXPECTED_OF_GROUPS if scope == "group" else _EXPECTED
    variant = _choose_variant(keyword_parameters, spec, scope)
    if variant is None:
        yield f"{shown} does not match a convention of reward functions; rename its parameters to those of {expected}"
        return
    # With an explicit signature, a function with **kwargs accepts the marker, too.
    if variant.marker not in keyword_parameters and arguments.kwarg is None:
        passed_names = ", ".join(variant.arguments)
        yield f"{shown} does not match signature: {variant.convention}, which passes ({passed_names})"
        return
    if scope == "group" and not variant.takes_groups:
        yield f"{shown} takes one sample, but scope: group passes lists; use one of {expected}, or remove scope"
        return
    unknown = [name for name in spec.kwargs if name not in keyword_parameters and arguments.kwarg is None]
    if unknown:
        yield f"{shown} does not accept {', '.join(unknown)}; remove it from function.kwargs, or add the parameter"
    if variant.convention == "trl":
        return  # other parameters are columns of the data
    passed = {*variant.arguments, *spec.kwargs}
    missing = [name for name in _required(arguments) if name not in passed]
    if missing:
        yield (
            f"{shown} requires {', '.join(missing)}, which the {variant.convention} convention does not pass; "
            "add a default, or a value in function.kwargs"
        )


def _choose_variant(parameter_names: list[str], spec: FunctionReward, scope: Scope) -> SignatureVariant | None:
    """Return the detected variant; with an explicit signature, its variant with a marker, else its default variant."""
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
    """Return the parameter names as written, without annotations and defaults."""
    shown = [parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        shown.append(f"*{arguments.vararg.arg}")
    shown += [parameter.arg for parameter in arguments.kwonlyargs]
    if arguments.kwarg:
        shown.append(f"**{arguments.kwarg.arg}")
    return ", ".join(shown)
