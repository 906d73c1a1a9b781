"""From a loaded entry point to bindings: functions, lists of functions, classes and objects of other projects.

The table rljob_api.functions.conventions has the forms, `forms` chooses one. Everything here runs in worker processes
and imports only the standard library, rljob_api.functions and rljob_api.errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from rljob_api.functions import forms
from rljob_api.functions.descriptions import Description, Function, Several, Unknown
from rljob_api.functions.forms import CallPlan, FormError, ObjectPlan, SeveralPlan
from rljob_reward.worker.adapters import inspection, manager, rubric, sample_then_group, task
from rljob_reward.worker.adapters.binding import Binding, NamedBinding, bind_call, combine, unique_names
from rljob_reward.worker.adapters.inspection import DescribeInSource


class Bound(NamedTuple):
    """An entry point that is ready to score."""

    sample: Binding | None
    group: Binding | None
    signature: str
    """The name of its convention, or of its kind: class, list, rubric, task, manager."""

    @property
    def reads_tokens(self) -> bool:
        return any(binding is not None and binding.reads_tokens for binding in (self.sample, self.group))


def bind(name: str, value: Any, spec: forms.FunctionSpec, scope: str, in_source: DescribeInSource) -> Bound:
    """Bind what the source defines as `name`. Raise FormError, with the fix, if its form is unknown.

    User code runs: a factory, the constructor of a class.
    """
    value = inspection.unwrap_remote(value)
    if spec.factory_args is not None and not isinstance(value, type):
        forms.check_factory(inspection.describe(name, value, in_source), spec.factory_args)
        value = inspection.unwrap_remote(value(**spec.factory_args))
        in_source = Unknown
    found = inspection.describe(name, value, in_source)
    plan = forms.plan_entrypoint(found, spec, scope)
    if isinstance(plan, ObjectPlan) and plan.kind == "scorer":
        sample, group = sample_then_group.bind(value(**spec.kwargs, **(spec.factory_args or {})), plan)
        return Bound(sample, group, sample_then_group.NAME)
    binding, signature = _bind(name, value, found, plan, spec, scope, in_source)
    return Bound(None, binding, signature) if scope == "group" else Bound(binding, None, signature)


def _bind(
    name: str,
    value: Any,
    found: Description,
    plan: forms.Plan,
    spec: forms.FunctionSpec,
    scope: str,
    in_source: DescribeInSource,
) -> tuple[Binding, str]:
    if isinstance(plan, SeveralPlan):
        assert isinstance(found, Several)
        names = unique_names([element.name for element in found.elements])
        elements = zip(value, found.elements, plan.plans, strict=True)
        bindings = [_bind(e.name, each, e, p, spec, scope, in_source)[0] for each, e, p in elements]
        return combine([NamedBinding(n, 1.0, b) for n, b in zip(names, bindings, strict=True)]), "list"
    if isinstance(plan, ObjectPlan):
        return _bind_object(name, value, plan, spec, scope)
    assert isinstance(plan, CallPlan)
    assert isinstance(found, Function)
    return bind_call(_callable(value, found), found, plan), plan.convention.name


def _callable(value: Callable[..., Any], found: Function) -> Callable[..., Any]:
    """Return the function; for the wrapper of a decorator that takes only *args, a call that passes them in order."""
    seen = inspection.read_parameters(found.name, value)
    return (
        inspection.take_positionally(value, found)
        if seen.var_positional and seen.is_opaque and not seen.var_keyword
        else value
    )


def _bind_object(name: str, value: Any, plan: ObjectPlan, spec: forms.FunctionSpec, scope: str) -> tuple[Binding, str]:
    if plan.kind == "task":
        return task.bind(value, name, spec.factory_args or {}), "task"
    if plan.kind == "manager":
        return manager.bind(value, name, spec.factory_args or {}), "manager"
    made = _construct(value, plan.constructor_parameter, spec.factory_args or {}) if isinstance(value, type) else value
    if plan.kind == "rubric":
        return rubric.bind(made, name, scope), "rubric"
    assert plan.call is not None
    method = made if plan.kind == "call" else made.score_answer
    return bind_call(method, inspection.read_parameters(name, method), plan.call), plan.call.convention.name


def _construct(cls: type, parameter: str, given: Mapping[str, Any]) -> Any:
    """Return an instance, created as its project creates it: with keyword arguments, or with one object of options."""
    if not parameter or not inspection.read_parameters(cls.__name__, cls).accepts(parameter):
        return cls(**given)
    if hasattr(cls, "get_config_class"):  # open-instruct
        return cls(**{parameter: cls.get_config_class()(**given) if given else None})
    return cls(**{parameter: SimpleNamespace(**given)})


__all__ = ["Bound", "FormError", "bind"]
