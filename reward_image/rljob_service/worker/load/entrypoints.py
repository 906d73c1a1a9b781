"""The reward in a user's source: which name it has, and how it is bound. Also what both kinds of entry points share.

Raises UserErrors and FormErrors; loading adds the place. Standard library only.
"""

import contextlib
import inspect
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

from rljob_api.errors import UserError
from rljob_api.functions import remedies
from rljob_api.functions.conventions import Signatures, load_signatures
from rljob_api.functions.descriptions import DEFAULT_ENTRYPOINTS, find_only_function
from rljob_api.functions.forms import FormError, plan_entrypoint
from rljob_service.worker import forms
from rljob_service.worker.forms import sample_then_group
from rljob_service.worker.forms.binding import NOT_ASYNC, Binding, CallBinding
from rljob_service.worker.forms.inspection import describe, name_of
from rljob_service.worker.settings import MODULE_NAME, FunctionSettings

Named = list[tuple[str, Any]]


class BoundFunction(NamedTuple):
    sample: Binding | None
    group: Binding | None
    entrypoint: str
    signature: str
    path: str
    """File named in errors."""
    reads: frozenset[str] = frozenset()
    """The parts of a request that it needs (rljob_api.wire.scores.Part)."""
    takes_groups: bool = False
    """Whether one call can score several samples."""
    calls: CallBinding | None = None
    """A simulated user, or tools. Then `sample` and `group` are None."""
    tools: tuple[dict[str, Any], ...] = ()
    """The fields of a ToolSchema each."""

    @property
    def alone(self) -> str:
        """Why a process cannot execute several requests at once, and what to do; empty if it can."""
        if self.calls is not None:
            return self.calls.alone
        found = [binding for binding in (self.sample, self.group) if binding is not None]
        return "" if all(binding.is_async for binding in found) else NOT_ASYNC


class Found(NamedTuple):
    """The entry point of a source."""

    name: str
    value: Any


def find(module: types.ModuleType, settings: FunctionSettings) -> Found:
    """Return the reward. Raise UserError, with what the source defines, if it has none."""
    own = list_own(module, settings)
    if settings.scope == "sampleThenGroup" and settings.entrypoint is None:
        candidates = [(name, value) for name, value in own if sample_then_group.is_scorer_class(value)]
    elif settings.entrypoint and "," in settings.entrypoint:
        names = settings.entrypoint.split(", ")
        each = [find(module, settings._replace(entrypoint=name)).value for name in names]
        return Found(settings.entrypoint, each)
    else:
        candidates = list_defined(module, (settings.entrypoint,) if settings.entrypoint else DEFAULT_ENTRYPOINTS)
    functions = {name: value for name, value in own if inspect.isfunction(value)}
    if not candidates and settings.entrypoint is None and settings.scope != "sampleThenGroup":
        candidates = list_defined(module, filter(None, (find_only_function(functions),)))
    if candidates:
        return Found(*candidates[0])
    classes = {name: dir(value) for name, value in own if inspect.isclass(value)}
    known = load_signatures(settings.signatures)
    scorers = [name for name, value in own if _has_form(name, value, settings, known)]
    problem = remedies.describe_missing_entrypoint(
        settings.entrypoint, settings.scope, list(functions), classes, scorers
    )
    raise UserError(f"{settings.path}:1: {problem}")


def _has_form(name: str, value: Any, settings: FunctionSettings, known: Signatures) -> bool:
    with contextlib.suppress(FormError):
        if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)):
            return bool(plan_entrypoint(describe(name, value), settings, settings.scope, known))
    return False


def bind(found: Found, settings: FunctionSettings, path: str) -> BoundFunction:
    """Bind the reward. Raise FormError if it cannot be called. User code runs: a factory, a constructor."""
    known = load_signatures(settings.signatures)
    bound = forms.bind(found.name, found.value, settings, settings.scope, known)
    name = name_of(found.value, found.name)
    return BoundFunction(bound.sample, bound.group, name, bound.signature, path, bound.reads, bound.takes_groups)


def list_defined(module: types.ModuleType, names: Iterable[str]) -> Named:
    return [(name, getattr(module, name)) for name in names if getattr(module, name, None) is not None]


def list_own(module: types.ModuleType, settings: FunctionSettings) -> list[tuple[str, Any]]:
    """Return what a module defines, in its order, without what it imports."""
    own = settings.module or MODULE_NAME
    named = [(name, value, getattr(value, "__module__", None) or "") for name, value in vars(module).items()]
    return [(name, value) for name, value, home in named if home == own or home.startswith(f"{own}.")]
