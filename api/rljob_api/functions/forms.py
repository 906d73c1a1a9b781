"""Decides how an entry point is called: from a description of it and the function's settings to a plan, or an error.

A worker describes the loaded object. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from rljob_api.functions import remedies
from rljob_api.functions.conventions import BY_COLUMNS, Convention, ObjectForm, Signatures
from rljob_api.functions.descriptions import SCORER_METHODS, Class, Description, Function, Other, Several
from rljob_api.functions.plugins import describe_unknown
from rljob_api.functions.values import Value, find_column


class FunctionSpec(Protocol):
    """The fields of `function` that decide how it is called."""

    @property
    def entrypoint(self) -> str | None: ...
    @property
    def signature(self) -> str: ...
    @property
    def kwargs(self) -> Mapping[str, Any]: ...
    @property
    def columns(self) -> Mapping[str, str]: ...
    @property
    def factory_args(self) -> Mapping[str, Any] | None: ...


class FunctionSettings(NamedTuple):
    """A FunctionSpec."""

    entrypoint: str | None = None
    signature: str = "auto"
    kwargs: Mapping[str, Any] = {}
    columns: Mapping[str, str] = {}
    factory_args: Mapping[str, Any] | None = None


class FormError(Exception):
    """The entry point has a form that cannot be called. Its text has the problem and the fix."""


class CallPlan(NamedTuple):
    """How to call a function."""

    convention: Convention
    values: Mapping[str, Value]
    """What to pass for each parameter; with function.columns also `extra_info.KEY`."""
    passed: tuple[str, ...]
    """Parameters that get their value."""
    optional: tuple[str, ...]
    """Parameters of the form that only **kwargs takes: passed, except token ids that the function does not read."""
    kwargs: Mapping[str, Any]
    required_columns: tuple[str, ...] = ()
    """Parameters that only a column of the data can give."""

    def reads(self, extra: Iterable[str] = ()) -> frozenset[str]:
        """Return the parts of a request that it needs (rljob_api.wire.scores.Part). `extra`: optional parameters that
        the function reads."""
        parts = {part for name in (*self.passed, *extra) for part in self.values[name].part.split()}
        return frozenset(parts | ({"whole"} if self.convention.whole else set()))


class ScorerPlan(NamedTuple):
    """How to use a class for scope: sampleThenGroup."""

    call: CallPlan


class MethodPlan(NamedTuple):
    """How to use a class or an object with __call__."""

    call: CallPlan


class ObjectPlan(NamedTuple):
    """How to use a class or an object of another project."""

    form: ObjectForm


class SeveralPlan(NamedTuple):
    plans: tuple[Plan, ...]


Plan = CallPlan | ScorerPlan | MethodPlan | ObjectPlan | SeveralPlan


def check_factory(factory: Description, given: Mapping[str, Any]) -> None:
    """Raise FormError if the entry point cannot be called with `given`, which is function.factoryArgs."""
    if isinstance(factory, (Several, Other)):
        what = "a list" if isinstance(factory, Several) else f"a {factory.what}"
        raise FormError(f"{factory.name} is {what}, but function.factoryArgs calls it; remove factoryArgs")
    if isinstance(factory, Function):
        check_call(factory, given, "function.factoryArgs")


def plan_entrypoint(found: Description, spec: FunctionSpec, scope: str, known: Signatures) -> Plan:
    """Return how to score with it. Raise FormError, with the fix, if its form is unknown or does not fit the scope."""
    if isinstance(found, Other):
        raise FormError(f"{found.name} is a {found.what}, not a function; set function.entrypoint to a function")
    if scope == "sampleThenGroup":
        return _plan_scorer(found, spec, known)
    if isinstance(found, Several):
        if not found.elements:
            raise FormError(f"{found.name} is an empty list; add functions to it")
        return SeveralPlan(tuple(plan_entrypoint(element, spec, scope, known) for element in found.elements))
    if isinstance(found, Class):
        return _plan_object(found, spec, scope, known)
    return plan_call(found, spec, scope, known)


def _plan_scorer(found: Function | Class | Several, spec: FunctionSpec, known: Signatures) -> Plan:
    required = f"a class with {' and '.join(SCORER_METHODS)}"
    if not isinstance(found, Class) or found.is_instance:
        what = "a function" if isinstance(found, Function) else "an object" if isinstance(found, Class) else "a list"
        raise FormError(f"{found.name} is {what}; scope: sampleThenGroup requires {required}")
    missing = [method for method in SCORER_METHODS if method not in found.methods]
    if missing:
        raise FormError(
            f"the class {found.name} has no {' and no '.join(missing)}, which scope: sampleThenGroup requires"
        )
    if found.constructor is not None:
        given = {**spec.kwargs, **(spec.factory_args or {})}
        check_call(found.constructor._replace(name=found.name), given, "function.kwargs")
    compute, post_process = (found.methods[method] for method in SCORER_METHODS)
    own = FunctionSettings(signature=spec.signature, columns=spec.columns)  # the constructor got function.kwargs
    call = plan_call(compute._replace(name=f"{found.name}.{compute.name}"), own, "sample", known)
    if not _takes_one(post_process):
        raise FormError(
            f"{found.name}.{post_process.show()} does not take only the group; write {SCORER_METHODS[1]}(self, group)"
        )
    return ScorerPlan(call)


def _takes_one(function: Function) -> bool:
    num_positional = len(function.positional_only) + len(function.named)
    return len(function.required) <= 1 and (num_positional > 0 or bool(function.var_positional))


def _plan_object(found: Class, spec: FunctionSpec, scope: str, known: Signatures) -> Plan:
    methods, name = found.methods, found.name
    for form in known.objects:
        if form.matches(found):
            form.check(found, scope)
            return ObjectPlan(form)
    if set(SCORER_METHODS) <= set(methods) and not found.is_instance and "__call__" not in methods:
        raise FormError(f"{name} is a class that scores samples and groups; set scope: sampleThenGroup")
    made = name if found.is_instance else f"{name}()"
    if "__call__" not in methods:
        what = "an object" if found.is_instance else "a class"
        first = next((each for each in methods if not each.startswith("_")), "METHOD")
        raise FormError(
            f"{name} is {what} without __call__; write\n"
            f"    scorer = {made}\n"
            "    def compute_score(response, ground_truth, **_):\n"
            f"        return scorer.{first}(response, ground_truth)"
        )
    allowed = (c for c in known.conventions if spec.signature in ("auto", c.name))
    inherited = next((c for c in allowed if found.bases.intersection(c.bases)), None)
    call = plan_call(methods["__call__"]._replace(name=made), spec, scope, known, inherited)
    if found.constructor is not None and not call.convention.constructor_parameter:
        check_call(found.constructor._replace(name=name), spec.factory_args or {}, "function.factoryArgs")
    return MethodPlan(call)


def plan_call(
    function: Function, spec: FunctionSpec, scope: str, known: Signatures, inherited: Convention | None = None
) -> CallPlan:
    """Return how to call a function. `inherited`: the form of the class whose method it is. Raise FormError."""
    shown, for_groups = function.show(), scope == "group"
    if function.positional_only:
        raise FormError(f"{shown} has positional-only parameters, but rewards are called by keyword; remove the '/'")
    unknown = [name for name in spec.columns if not function.accepts(name)]
    if unknown:
        raise FormError(f"{shown} does not accept {', '.join(unknown)}; remove it from function.columns")
    convention = inherited or _find_convention(function, spec, for_groups, known)
    if convention is None:
        open_ones = tuple(name for name in function.required if name not in spec.kwargs)
        problem = remedies.describe_unknown_form(function._replace(required=open_ones), known.conventions)
        raise FormError(problem + remedies.describe_broken(known.broken))
    if for_groups and not convention.lists:
        raise FormError(
            f"{shown} takes one sample, but scope: group passes lists; remove scope, or write a function of lists that "
            "calls it for each sample"
        )
    uses_kwargs = not convention.kwargs_parameter
    unknown = [name for name in spec.kwargs if uses_kwargs and not function.accepts(name)]
    if unknown:
        taken = ", ".join(sorted(function.named))
        raise FormError(
            f"{shown} does not accept {', '.join(unknown)}; remove it from function.kwargs, or add the parameter "
            f"(it takes {taken})"
        )
    missing = _missing(function, convention, spec)
    if remedy := next((known.not_sent[name] for name in missing if name in known.not_sent), None):
        raise FormError(f"{remedies.describe_missing(shown, missing, convention)}; {remedy}")
    if _find_completions(known).intersection(missing):
        raise FormError(remedies.describe_missing_values(shown, missing, convention))
    values = {**convention.arguments, **{name: find_column(column) for name, column in spec.columns.items()}}
    values = {name: value for name, value in values.items() if not uses_kwargs or name not in spec.kwargs}
    passed = tuple(name for name in values if name in function.named or name in spec.columns)
    optional = tuple(name for name in values if name not in passed and function.var_keyword)
    return CallPlan(convention, values, passed, optional, spec.kwargs, tuple(missing))


def _find_completions(known: Signatures) -> frozenset[str]:
    """Return names that mean a completion in every form: a parameter of this name that gets nothing is not a column."""
    arguments = [item for convention in known.conventions for item in convention.arguments.items()]
    others = {name for name, value in arguments if not value.is_completion}
    return frozenset(name for name, value in arguments if value.is_completion) - others


def _find_named(function: Function, named: list[Convention], for_groups: bool) -> Convention | None:
    """Return the form of an explicit signature: by its markers, else its default for samples or groups."""
    marked = [convention for convention in named if _has_markers(function, convention)]
    if marked or not function.var_keyword:
        return next(iter(marked), None)
    return next((c for c in named if c.lists == for_groups), named[0])


def _find_convention(function: Function, spec: FunctionSpec, for_groups: bool, known: Signatures) -> Convention | None:
    if spec.signature != "auto":
        named = [convention for convention in known.conventions if convention.name == spec.signature]
        if not named:
            raise FormError(f"signature: {describe_signature(spec.signature, known)}")
        found = _find_named(function, named, for_groups)
        if found is None:
            what = f"{function.show()} does not match signature: {spec.signature}"
            raise FormError(f"{what}, which calls {named[0].form}")
        return found
    # Parameters that are mapped by hand may have any name: they identify nothing, unless others have no value.
    given = {*spec.columns, *spec.kwargs}
    unmapped = function._replace(named=tuple(name for name in function.named if name not in spec.columns))
    marked = [c for c in known.conventions if _has_markers(unmapped, c) and _has_literals(unmapped, c)]
    if not marked and given.issuperset(function.required):
        return BY_COLUMNS._replace(lists=for_groups) if spec.columns else None
    marked = marked or [c for c in known.conventions if _has_markers(function, c) and _has_literals(function, c)]
    # A column may give any parameter: a form that names all of them precedes one that does not.
    complete = [c for c in marked if not c.has_columns and not _missing(function, c, spec)]
    return next(iter(complete or marked), None)


def describe_signature(name: str, known: Signatures) -> str:
    """Return why a value of function.signature is not one of `known.names`."""
    if name in known.broken:
        return f"the plugin of {name} cannot be imported: {known.broken[name]}"
    return describe_unknown(name, known.names)


def _has_markers(function: Function, convention: Convention) -> bool:
    names = {*function.named, *(f"{name}: {annotation}" for name, annotation in function.annotations.items())}
    return names.issuperset(convention.markers)


def _has_literals(function: Function, convention: Convention) -> bool:
    return not convention.literals or bool(function.literals.intersection(convention.literals))


def _missing(function: Function, convention: Convention, spec: FunctionSpec) -> list[str]:
    """Return required parameters to which the form gives no value. They may be columns, which only a request names."""
    given = {*convention.arguments, *spec.kwargs, *spec.columns, *convention.callbacks, convention.kwargs_parameter}
    return [name for name in function.required if name not in given]


def check_call(function: Function, given: Mapping[str, Any], field: str) -> None:
    """Raise FormError if a function, or a constructor, cannot be called with the keyword arguments of `field`."""
    missing = [name for name in function.required if name not in given]
    if missing or function.positional_only:
        names = ", ".join(missing or function.positional_only)
        raise FormError(f"{function.show()} requires {names}; set {field}: {{{names.split(', ')[0]}: ...}}")
    unknown = [name for name in given if not function.accepts(name)]
    if unknown:
        raise FormError(f"{function.show()} does not accept {', '.join(unknown)}; remove it from {field}")
