"""Decides how an entry point is called: from a description of it and the function's settings to a plan, or an error.

The static check describes source text, a worker describes the loaded object; both decide here, so that they agree and
use the same messages. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from rljob_api.functions import remedies
from rljob_api.functions.conventions import BY_COLUMNS, CONVENTIONS, NOT_SENT, TOKEN_VALUES, Convention, Value
from rljob_api.functions.descriptions import SCORER_METHODS, Class, Description, Function, Other, Several, Unknown

RUBRIC_METHODS: Final = frozenset({"_get_reward_funcs", "get_reward_funcs"})
"""A Rubric of verifiers has one, depending on its version."""

_RUBRIC: Final = "Rubric"
_TASK: Final = "Task"
_MANAGER_METHOD: Final = "run_single"


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

    def reads_tokens(self, extra: Iterable[str] = ()) -> bool:
        return any(self.values[name] in TOKEN_VALUES for name in (*self.passed, *extra))


class ObjectPlan(NamedTuple):
    """How to use a class or an object: `kind` is scorer, rubric, task, manager, call or score_answer."""

    kind: str
    call: CallPlan | None = None
    """For kinds with one method."""
    constructor_parameter: str = ""


class SeveralPlan(NamedTuple):
    plans: tuple[Plan, ...]


class UnknownPlan(NamedTuple):
    """Whether it can be called is decided when the source runs."""


Plan = CallPlan | ObjectPlan | SeveralPlan | UnknownPlan


def check_factory(factory: Description, given: Mapping[str, Any]) -> None:
    """Raise FormError if the entry point cannot be called with `given`, which is function.factoryArgs."""
    if isinstance(factory, (Several, Other)):
        what = "a list" if isinstance(factory, Several) else f"a {factory.what}"
        raise FormError(f"{factory.name} is {what}, but function.factoryArgs calls it; remove factoryArgs")
    if isinstance(factory, Function):
        check_call(factory, given, "function.factoryArgs")


def plan_entrypoint(found: Description, spec: FunctionSpec, scope: str) -> Plan:
    """Return how to score with it. Raise FormError, with the fix, if its form is unknown or does not fit the scope."""
    if isinstance(found, Unknown):
        return UnknownPlan()
    if isinstance(found, Other):
        raise FormError(f"{found.name} is a {found.what}, not a function; set function.entrypoint to a function")
    if scope == "sampleThenGroup":
        return _plan_scorer(found, spec)
    if isinstance(found, Several):
        if not found.elements:
            raise FormError(f"{found.name} is an empty list; add functions to it")
        return SeveralPlan(tuple(plan_entrypoint(element, spec, scope) for element in found.elements))
    if isinstance(found, Class):
        return _plan_object(found, spec, scope)
    return plan_call(found, spec, scope)


def _plan_scorer(found: Function | Class | Several, spec: FunctionSpec) -> Plan:
    required = f"a class with {' and '.join(SCORER_METHODS)}"
    if not isinstance(found, Class) or found.is_instance:
        what = "a function" if isinstance(found, Function) else "an object" if isinstance(found, Class) else "a list"
        raise FormError(f"{found.name} is {what}; scope: sampleThenGroup requires {required}")
    missing = [method for method in SCORER_METHODS if method not in found.methods]
    if missing and not found.is_open:
        raise FormError(
            f"the class {found.name} has no {' and no '.join(missing)}, which scope: sampleThenGroup requires"
        )
    if found.constructor is not None:
        given = {**spec.kwargs, **(spec.factory_args or {})}
        check_call(found.constructor._replace(name=found.name), given, "function.kwargs")
    call = None
    if compute := found.methods.get(SCORER_METHODS[0]):
        own = FunctionSettings(signature=spec.signature, columns=spec.columns)  # the constructor got function.kwargs
        call = plan_call(compute._replace(name=f"{found.name}.{compute.name}"), own, "sample")
    post_process = found.methods.get(SCORER_METHODS[1])
    if post_process and not _takes_one(post_process):
        raise FormError(
            f"{found.name}.{post_process.show()} does not take only the group; write {SCORER_METHODS[1]}(self, group)"
        )
    return ObjectPlan("scorer", call)


def _takes_one(function: Function) -> bool:
    num_positional = len(function.positional_only) + len(function.named)
    return len(function.required) <= 1 and (num_positional > 0 or bool(function.var_positional))


def _plan_object(found: Class, spec: FunctionSpec, scope: str) -> Plan:
    methods, name = found.methods, found.name
    if RUBRIC_METHODS.intersection(methods) or (_RUBRIC in found.bases and "__call__" not in methods):
        return ObjectPlan("rubric")
    if _TASK in found.bases and "__call__" not in methods:
        return _plan_task(found)
    if set(SCORER_METHODS) <= set(methods) and not found.is_instance and "__call__" not in methods:
        raise FormError(f"{name} is a class that scores samples and groups; set scope: sampleThenGroup")
    if _MANAGER_METHOD in methods:
        return _plan_manager(found, scope)
    inherited = _find_base_form(found.bases, spec)
    if "__call__" in methods:
        call = plan_call(methods["__call__"]._replace(name=name), spec, scope, inherited)
        kind = "call"
    elif "score_answer" in methods:
        call, kind = (
            plan_call(methods["score_answer"]._replace(name=f"{name}.score_answer"), spec, scope),
            "score_answer",
        )
    elif found.is_open:
        return UnknownPlan()
    else:
        what = "an object" if found.is_instance else "a class"
        made = name if found.is_instance else f"{name}()"
        method = next((method for method in methods if not method.startswith("_")), "METHOD")
        raise FormError(
            f"{name} is {what} without __call__; write\n"
            f"    scorer = {made}\n"
            "    def compute_score(solution_str, ground_truth, **_):\n"
            f"        return scorer.{method}(solution_str, ground_truth)"
        )
    constructor = "" if found.is_instance else call.convention.constructor_parameter
    if found.constructor is not None and not constructor:
        check_call(found.constructor._replace(name=name), spec.factory_args or {}, "function.factoryArgs")
    return ObjectPlan(kind, call, constructor)


def _plan_task(found: Class) -> ObjectPlan:
    """Plan a Task of verifiers. A reward that does not run would be missing in the sum, so it is refused."""
    for name in sorted(found.rewards):
        if "runtime" in found.methods[name].required:
            shown = f"{found.name}.{found.methods[name].show()}"
            raise FormError(
                f"{shown} requires runtime, which exists only in a rollout of verifiers; write runtime=None, and score "
                "from the trace without it"
            )
    if not found.rewards and not found.is_open:
        raise FormError(f"{found.name} has no method marked with @reward; add one")
    return ObjectPlan("task")


def _plan_manager(found: Class, scope: str) -> ObjectPlan:
    """Plan a reward manager of verl, which decodes tokens and calls a function."""
    if found.is_instance or scope == "group":
        what = "is an object; name the class" if found.is_instance else "scores one sample; remove scope"
        raise FormError(
            f"{found.name} is a reward manager of verl and {what}, or write\n"
            "    from verl.utils.reward_score import default_compute_score\n"
            "    def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            "        return default_compute_score(data_source, solution_str, ground_truth, extra_info)"
        )
    return ObjectPlan("manager")


def _find_base_form(bases: frozenset[str], spec: FunctionSpec) -> Convention | None:
    fitting = (c for c in CONVENTIONS if spec.signature in ("auto", c.name) and bases.intersection(c.bases))
    return next(fitting, None)


def plan_call(function: Function, spec: FunctionSpec, scope: str, inherited: Convention | None = None) -> CallPlan:
    """Return how to call a function. `inherited`: the form of the class whose method it is. Raise FormError."""
    shown, for_groups = function.show(), scope == "group"
    if function.positional_only:
        raise FormError(f"{shown} has positional-only parameters, but rewards are called by keyword; remove the '/'")
    unknown = [name for name in spec.columns if not function.accepts(name)]
    if unknown:
        raise FormError(f"{shown} does not accept {', '.join(unknown)}; remove it from function.columns")
    convention = inherited or _find_convention(function, spec, for_groups)
    if convention is None:
        raise FormError(remedies.describe_unknown_form(function, for_groups))
    if for_groups and not convention.lists:
        adapter = remedies.write_adapter(function, for_groups=True)
        raise FormError(f"{shown} takes one sample, but scope: group passes lists; remove scope, or {adapter}")
    uses_kwargs = not convention.kwargs_parameter
    unknown = [name for name in spec.kwargs if uses_kwargs and not function.accepts(name)]
    if unknown:
        taken = ", ".join(sorted(function.named))
        raise FormError(
            f"{shown} does not accept {', '.join(unknown)}; remove it from function.kwargs, or add the parameter "
            f"(it takes {taken})"
        )
    if missing := _missing(function, convention, spec):
        raise FormError(remedies.describe_missing_values(shown, missing, convention))
    values: dict[str, Any] = {**convention.arguments, **spec.columns}
    values = {name: value for name, value in values.items() if not uses_kwargs or name not in spec.kwargs}
    passed = tuple(name for name in values if name in function.named or name in spec.columns)
    optional = tuple(name for name in values if name not in passed and function.var_keyword)
    return CallPlan(convention, values, passed, optional, spec.kwargs)


def find_named_convention(function: Function, signature: str, for_groups: bool) -> Convention | None:
    """Return the form of an explicit signature: by its markers, else its default for samples or groups."""
    named = [convention for convention in CONVENTIONS if convention.name == signature]
    marked = [convention for convention in named if _has_markers(function, convention)]
    if marked or not function.var_keyword:
        return next(iter(marked), None)
    return next((c for c in named if c.lists == for_groups), named[0] if named else None)


def _find_convention(function: Function, spec: FunctionSpec, for_groups: bool) -> Convention | None:
    if spec.signature != "auto":
        found = find_named_convention(function, spec.signature, for_groups)
        if found is None:
            form = next(c.form for c in CONVENTIONS if c.name == spec.signature)
            raise FormError(f"{function.show()} does not match signature: {spec.signature}, which calls {form}")
        return found
    # Parameters that are mapped by hand may have any name: they identify nothing.
    unmapped = function._replace(named=tuple(name for name in function.named if name not in spec.columns))
    marked = [convention for convention in CONVENTIONS if _has_markers(unmapped, convention)]
    # A form with columns accepts any parameter: it fits only if no form that names all of them precedes it.
    complete = [c for c in marked if not c.has_columns and not _missing(function, c, spec)]
    if complete or marked:
        return (complete or marked)[0]
    given = {*spec.columns, *spec.kwargs}
    return BY_COLUMNS._replace(lists=for_groups) if spec.columns and given.issuperset(function.required) else None


def _has_markers(function: Function, convention: Convention) -> bool:
    names = {*function.named, *(f"{name}: {annotation}" for name, annotation in function.annotations.items())}
    return names.issuperset(convention.markers)


def _missing(function: Function, convention: Convention, spec: FunctionSpec) -> list[str]:
    """Return required parameters without a value. Other parameters may be columns, which only a request names."""
    given = {*convention.arguments, *spec.kwargs, *spec.columns, convention.kwargs_parameter}
    missing = [name for name in function.required if name not in given]
    return [name for name in missing if name in NOT_SENT] if convention.has_columns else missing


def check_call(function: Function, given: Mapping[str, Any], field: str) -> None:
    """Raise FormError if a function, or a constructor, cannot be called with the keyword arguments of `field`."""
    missing = [name for name in function.required if name not in given]
    if missing or function.positional_only:
        names = ", ".join(missing or function.positional_only)
        raise FormError(f"{function.show()} requires {names}; set {field}: {{{names.split(', ')[0]}: ...}}")
    unknown = [name for name in given if not function.accepts(name)]
    if unknown:
        raise FormError(f"{function.show()} does not accept {', '.join(unknown)}; remove it from {field}")
