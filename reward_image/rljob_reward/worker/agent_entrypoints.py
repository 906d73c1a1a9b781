"""The simulated user or the tools in a user's source: which names they have, and how they are bound.

Apart from the entry points of rewards, whose workers do not import this. Raises UserErrors and FormErrors; loading adds
the place. Standard library only.
"""

from __future__ import annotations

import inspect
import types
from typing import Final

from rljob_api.errors import UserError
from rljob_api.functions import forms, tool_forms, user_forms
from rljob_api.functions.descriptions import Function
from rljob_reward.worker.adapters import inspection, interaction, tools, user
from rljob_reward.worker.adapters.binding import CallBinding
from rljob_reward.worker.adapters.inspection import DescribeInSource, name_of
from rljob_reward.worker.entrypoints import BoundFunction, Found, Named, list_defined, list_own
from rljob_reward.worker.settings import CODE_MODULE, TOOLS, USER, FunctionSettings

_OWN_TOOLS: Final = ("rljob_reward.worker.mcp_client", CODE_MODULE)
"""Modules of the image whose classes have the schemas of their tools, and answer calls themselves."""


def prepare(settings: FunctionSettings) -> None:
    """Called before the source runs."""
    if settings.serves == USER:
        interaction.provide_base_class()


def find(module: types.ModuleType, settings: FunctionSettings) -> Found:
    """Return the entry point. Raise UserError, with what the source defines, if it has none."""
    own = list_own(module, settings)
    is_user = settings.serves == USER
    if candidates := (_find_user if is_user else _find_tools)(module, settings, own):
        return Found(*candidates[0])
    defined = [name for name, value in own if inspect.isfunction(value) or inspect.isclass(value)]
    describe = user_forms.describe_missing_user if is_user else tool_forms.describe_missing_tools
    raise UserError(f"{settings.path}:1: {describe(settings.entrypoint, defined)}")


def _find_user(module: types.ModuleType, settings: FunctionSettings, own: Named) -> Named:
    found = list_defined(module, [settings.entrypoint or user_forms.RESPOND])
    if found or settings.entrypoint is not None:
        return found
    return [(name, value) for name, value in own if inspect.isclass(value) and user_forms.is_user_class(dir(value))]


def _find_tools(module: types.ModuleType, settings: FunctionSettings, own: Named) -> Named:
    if settings.entrypoint is not None:
        return list_defined(module, [settings.entrypoint])
    if isinstance(listed := getattr(module, tool_forms.TOOLS, None), (list, tuple)):
        return [(tool_forms.TOOLS, listed)]
    public = tools.list_public(own)
    return [(tool_forms.TOOLS, public)] if public else []


def bind(found: Found, settings: FunctionSettings, path: str, in_source: DescribeInSource) -> BoundFunction:
    """Bind what the server serves. Raise FormError if it cannot be called. User code runs: a factory, constructors."""
    made = _make(found, settings, in_source)
    return (_bind_user if settings.serves == USER else _bind_tools)(made, settings, path, in_source)


def _bind_user(found: Found, settings: FunctionSettings, path: str, in_source: DescribeInSource) -> BoundFunction:
    name, value = found
    described = inspection.describe(name, value, in_source)
    plan = user_forms.plan_user(described, settings.kwargs, settings.factory_args)
    if plan.kind == "function":
        assert isinstance(described, Function)
        calls, signature = user.bind(value, described, settings.kwargs), user_forms.RESPOND
    else:
        made = value(**plan.arguments) if inspect.isclass(value) else value
        if plan.kind == "interaction":
            calls, signature = interaction.bind(made, name), "verl interaction"
        else:
            method = getattr(made, plan.method)
            calls, signature = user.bind(method, inspection.read_parameters(plan.method, method), {}), name
    return BoundFunction(None, None, name_of(value, name), signature, path, calls=calls)


def _bind_tools(found: Found, settings: FunctionSettings, path: str, in_source: DescribeInSource) -> BoundFunction:
    if settings.module in _OWN_TOOLS:
        own = found.value(**settings.factory_args or {})
        calls = CallBinding(own.call, lambda value, request: value, lambda: own.problem)
        names = ", ".join(schema["name"] for schema in own.schemas)
        return BoundFunction(None, None, names, TOOLS, path, calls=calls, tools=tuple(own.schemas))
    elements = tools.list_elements(*found)
    schemas, calls = tools.bind(elements, settings.kwargs, settings.factory_args, in_source)
    names = ", ".join(schema["name"] for schema in schemas)
    return BoundFunction(None, None, names, TOOLS, path, calls=calls, tools=tuple(schemas))


def _make(found: Found, settings: FunctionSettings, in_source: DescribeInSource) -> Found:
    """Return the entry point; of a factory, what it returns."""
    is_list = settings.serves == TOOLS and settings.entrypoint is None
    if settings.factory_args is None or inspect.isclass(found.value) or is_list:
        return found
    forms.check_factory(inspection.describe(found.name, found.value, in_source), settings.factory_args)
    return Found(found.name, found.value(**settings.factory_args))
