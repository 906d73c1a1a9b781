"""Check a reward function without running it: syntax, entry point and form.

Describes the entry point from its source text; `forms` decides, as it does for the loaded object in a worker.
Invariant: user code is never executed, and what parsing cannot determine (an imported name) is not reported.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

from rljob_api.functions import forms, remedies
from rljob_api.functions.conventions import Signatures
from rljob_api.functions.descriptions import (
    DEFAULT_ENTRYPOINTS,
    SCORER_METHODS,
    Class,
    Description,
    Function,
    Several,
    find_only_function,
)
from rljob_api.functions.forms import CallPlan, FormError, FunctionSpec, MethodPlan, Plan, ScorerPlan, SeveralPlan
from rljob_api.functions.source import FunctionNode, SourceNames, parse


def check_function(
    source: str,
    filename: str,
    spec: FunctionSpec,
    known: Signatures,
    scope: str = "sample",
    columns: Collection[str] | None = None,
) -> list[str]:
    """Return the problems of a reward function's source, each beginning with `filename:line:`. `known`: the forms that
    are installed. `columns`: of the data, which any parameter may name; None if unknown."""
    try:
        tree = parse(source, filename)
    except SyntaxError as error:
        return [f"{filename}:{error.lineno or 1}: the reward function has a syntax error: {error.msg}"]
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deeply
        return [f"{filename}: the reward function cannot be parsed: {error}"]
    names = SourceNames(tree)
    name = _find_entrypoint(names, spec.entrypoint, scope)
    if name is None:
        # `from x import *` may define any name; the reward server checks it.
        return (
            [] if "*" in names.statements else [f"{filename}:1: {_missing_entrypoint(names, spec.entrypoint, scope)}"]
        )
    try:
        found = names.describe(name)
        if spec.factory_args is not None and not (isinstance(found, Class) and not found.is_instance):
            forms.check_factory(found, spec.factory_args)
            found = names.describe_result(name)
        plan = forms.plan_entrypoint(found, spec, scope, known)
        if columns is not None:
            _check_columns(found, plan, columns)
    except FormError as error:
        return [f"{filename}:{names.statements[name].lineno}: {error}"]
    return []


def _check_columns(found: Description, plan: Plan, columns: Collection[str]) -> None:
    """Raise FormError if a parameter is neither an argument of its form nor a column."""
    for shown, call in _list_calls(found, plan):
        if missing := [name for name in call.required_columns if name not in columns]:
            raise FormError(remedies.describe_missing_values(shown, missing, call.convention, columns))


def _list_calls(found: Description, plan: Plan) -> Iterator[tuple[str, CallPlan]]:
    """Yield the functions that are called, as text, and how."""
    if isinstance(plan, SeveralPlan) and isinstance(found, Several):
        for element, own in zip(found.elements, plan.plans, strict=True):
            yield from _list_calls(element, own)
    elif isinstance(plan, CallPlan) and isinstance(found, Function):
        yield found.show(), plan
    elif isinstance(plan, (MethodPlan, ScorerPlan)) and isinstance(found, Class) and plan.call is not None:
        yield found.name, plan.call


def _find_entrypoint(names: SourceNames, entrypoint: str | None, scope: str) -> str | None:
    candidates: Iterable[str] = DEFAULT_ENTRYPOINTS
    defined = names.statements
    if entrypoint:
        candidates = (entrypoint,)
    elif scope == "sampleThenGroup":
        classes = {name: names.describe(name) for name, node in defined.items() if isinstance(node, ast.ClassDef)}
        known = {name: found for name, found in classes.items() if isinstance(found, Class)}
        complete = (name for name, found in known.items() if set(SCORER_METHODS) <= set(found.methods))
        # Inherited methods are unknown here; the reward server checks them.
        candidates = (*complete, *(name for name, found in known.items() if found.is_open))
    found = next((name for name in candidates if name in defined), None)
    if found is None and not entrypoint and scope != "sampleThenGroup":
        return find_only_function(name for name, node in defined.items() if isinstance(node, FunctionNode))
    return found


def _missing_entrypoint(names: SourceNames, entrypoint: str | None, scope: str) -> str:
    functions = [name for name, node in names.statements.items() if isinstance(node, FunctionNode)]
    described = {n: names.describe(n) for n, node in names.statements.items() if isinstance(node, ast.ClassDef)}
    classes = {name: found.methods for name, found in described.items() if isinstance(found, Class)}
    return remedies.describe_missing_entrypoint(entrypoint, scope, functions, classes)
