"""From a loaded entry point to bindings: functions, lists of functions, classes and objects.

The table rljob_api.functions.conventions has the forms, `forms` chooses one; plugins bind objects of their projects.
Everything here runs in worker processes and imports only the standard library, rljob_api.functions and
rljob_api.errors.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from rljob_api.functions import forms
from rljob_api.functions.conventions import Convention, Signatures
from rljob_api.functions.descriptions import Description, Function, Several
from rljob_api.functions.forms import CallPlan, FormError, MethodPlan, ObjectPlan, ScorerPlan, SeveralPlan
from rljob_api.functions.plugins import load_reference
from rljob_service.worker.forms import inspection, sample_then_group
from rljob_service.worker.forms.binding import Binding, NamedBinding, bind_call, combine, unique_names


class Bound(NamedTuple):
    """An entry point that is ready to score."""

    sample: Binding | None
    group: Binding | None
    signature: str
    """The name of its convention, of a plugin's form, or of its kind: class, list."""

    @property
    def reads(self) -> frozenset[str]:
        """The parts of a request that it needs (rljob_api.wire.scores.Part)."""
        return frozenset().union(*(binding.reads for binding in (self.sample, self.group) if binding is not None))

    @property
    def takes_groups(self) -> bool:
        """Whether one call can score several samples."""
        return any(binding is not None and binding.takes_groups for binding in (self.sample, self.group))


def bind(name: str, value: Any, spec: forms.FunctionSpec, scope: str, known: Signatures) -> Bound:
    """Bind what the source defines as `name`. Raise FormError, with the fix, if its form is unknown.

    User code runs: a factory, the constructor of a class.
    """
    value = inspection.unwrap_remote(value)
    if spec.factory_args is not None and not isinstance(value, type):
        forms.check_factory(inspection.describe(name, value), spec.factory_args)
        value = inspection.unwrap_remote(value(**spec.factory_args))
    found = inspection.describe(name, value)
    plan = forms.plan_entrypoint(found, spec, scope, known)
    if isinstance(plan, ScorerPlan):
        sample, group = sample_then_group.bind(value(**spec.kwargs, **(spec.factory_args or {})), plan)
        return Bound(sample, group, sample_then_group.NAME)
    binding, signature = _bind(name, value, found, plan, spec.factory_args or {}, scope)
    return Bound(None, binding, signature) if scope == "group" else Bound(binding, None, signature)


def _bind(
    name: str, value: Any, found: Description, plan: forms.Plan, options: Mapping[str, Any], scope: str
) -> tuple[Binding, str]:
    """Return the binding and its signature. `options` are function.factoryArgs, for a class."""
    if isinstance(plan, SeveralPlan):
        assert isinstance(found, Several)
        names = unique_names([element.name for element in found.elements])
        elements = zip(value, found.elements, plan.plans, strict=True)
        bindings = [_bind(e.name, each, e, p, options, scope)[0] for each, e, p in elements]
        return combine([NamedBinding(n, 1.0, b) for n, b in zip(names, bindings, strict=True)]), "list"
    if isinstance(plan, ObjectPlan):
        binding: Binding = load_reference(plan.form.bind)(value, name, options, scope)
        return binding, plan.form.name
    if isinstance(plan, MethodPlan):
        made = _construct(value, plan.call.convention, options) if isinstance(value, type) else value
        return bind_call(made, inspection.read_parameters(name, made), plan.call), plan.call.convention.name
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


def _construct(cls: type, convention: Convention, given: Mapping[str, Any]) -> Any:
    """Return an instance, created as its project creates it: with keyword arguments, or with one object of options."""
    parameter = convention.constructor_parameter
    if not parameter or not inspection.read_parameters(cls.__name__, cls).accepts(parameter):
        return cls(**given)
    return cls(**{parameter: SimpleNamespace(**given)})


__all__ = ["Bound", "FormError", "bind"]
