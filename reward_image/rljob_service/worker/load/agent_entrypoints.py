"""The simulated user or the tools in a user's source: which names they have, and how they are bound.

Apart from the entry points of rewards, whose workers do not import this. Raises UserErrors and FormErrors; loading adds
the place. Standard library only.
"""

import contextlib
import inspect
import types
from typing import Final

from rljob_api.errors import UserError
from rljob_api.functions import forms, tool_forms, user_forms
from rljob_api.functions.conventions import Signatures, load_signatures
from rljob_api.functions.descriptions import Function
from rljob_api.functions.plugins import load_reference
from rljob_service.worker.forms import inspection, tools, user
from rljob_service.worker.forms.binding import CallBinding
from rljob_service.worker.forms.inspection import name_of
from rljob_service.worker.load.entrypoints import BoundFunction, Found, Named, list_defined, list_own
from rljob_service.worker.settings import CODE_MODULE, TOOLS, USER, FunctionSettings

_OWN_TOOLS: Final = ("rljob_service.worker.mcp_client", CODE_MODULE)
"""Modules of the image whose classes have the schemas of their tools, and answer calls themselves."""


def prepare(settings: FunctionSettings) -> None:
    """Called before the source runs: plugins may provide modules that it imports."""
    if settings.serves == USER:
        for form in load_signatures(settings.signatures).users:
            with contextlib.suppress(Exception):  # of the plugin: its own classes fail with it, when they are bound
                load_reference(form.bind)


def find(module: types.ModuleType, settings: FunctionSettings) -> Found:
    """Return the entry point. Raise UserError, with what the source defines, if it has none."""
    own = list_own(module, settings)
    defined = [name for name, value in own if inspect.isfunction(value) or inspect.isclass(value)]
    if settings.serves == USER:
        known = load_signatures(settings.signatures)
        candidates = _find_user(module, settings, own, known)
        problem = user_forms.describe_missing_user(settings.entrypoint, defined, known)
    else:
        candidates = _find_tools(module, settings, own)
        problem = tool_forms.describe_missing_tools(settings.entrypoint, defined)
    if candidates:
        return Found(*candidates[0])
    raise UserError(f"{settings.path}:1: {problem}")


def _find_user(module: types.ModuleType, settings: FunctionSettings, own: Named, known: Signatures) -> Named:
    found = list_defined(module, [settings.entrypoint or user_forms.RESPOND])
    if found or settings.entrypoint is not None:
        return found
    classes = [(name, value) for name, value in own if inspect.isclass(value)]
    return [(name, value) for name, value in classes if user_forms.is_user_class(dir(value), known)]


def _find_tools(module: types.ModuleType, settings: FunctionSettings, own: Named) -> Named:
    if settings.entrypoint is not None:
        return list_defined(module, [settings.entrypoint])
    if isinstance(listed := getattr(module, tool_forms.TOOLS, None), (list, tuple)):
        return [(tool_forms.TOOLS, listed)]
    public = tools.list_public(own)
    return [(tool_forms.TOOLS, public)] if public else []


def bind(found: Found, settings: FunctionSettings, path: str) -> BoundFunction:
    """Bind what the server serves. Raise FormError if it cannot be called. User code runs: a factory, constructors."""
    made = _make(found, settings)
    return (_bind_user if settings.serves == USER else _bind_tools)(made, settings, path)


def _bind_user(found: Found, settings: FunctionSettings, path: str) -> BoundFunction:
    name, value = found
    described = inspection.describe(name, value)
    known = load_signatures(settings.signatures)
    plan = user_forms.plan_user(described, settings.kwargs, settings.factory_args, known)
    if plan.kind == "function":
        assert isinstance(described, Function)
        calls, signature = user.bind(value, described, settings.kwargs), user_forms.RESPOND
    else:
        made = value(**plan.arguments) if inspect.isclass(value) else value
        if plan.form is not None:
            calls, signature = load_reference(plan.form.bind)(made, name), plan.form.name
        else:
            method = getattr(made, plan.method)
            calls, signature = user.bind(method, inspection.read_parameters(plan.method, method), {}), name
    return BoundFunction(None, None, name_of(value, name), signature, path, calls=calls)


def _bind_tools(found: Found, settings: FunctionSettings, path: str) -> BoundFunction:
    if settings.module in _OWN_TOOLS:
        own = found.value(**settings.factory_args or {})
        calls = CallBinding(own.call, lambda value, request: value, lambda: own.problem)
        names = ", ".join(schema["name"] for schema in own.schemas)
        return BoundFunction(None, None, names, TOOLS, path, calls=calls, tools=tuple(own.schemas))
    elements = tools.list_elements(*found)
    schemas, calls = tools.bind(elements, settings.kwargs, settings.factory_args)
    names = ", ".join(schema["name"] for schema in schemas)
    return BoundFunction(None, None, names, TOOLS, path, calls=calls, tools=tuple(schemas))


def _make(found: Found, settings: FunctionSettings) -> Found:
    """Return the entry point; of a factory, what it returns."""
    is_list = settings.serves == TOOLS and settings.entrypoint is None
    if settings.factory_args is None or inspect.isclass(found.value) or is_list:
        return found
    forms.check_factory(inspection.describe(found.name, found.value), settings.factory_args)
    return Found(found.name, found.value(**settings.factory_args))
