"""The program or the environment that a runner serves: which name it has in the source, and how it is bound.

Apart from the other entry points, whose workers do not import this. Raises UserErrors and FormErrors; loading adds the
place. Standard library only.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, Final

from rljob_api.errors import UserError
from rljob_api.functions import episode_forms, forms
from rljob_api.functions.descriptions import Function
from rljob_reward.worker import environments
from rljob_reward.worker.adapters import inspection
from rljob_reward.worker.adapters.inspection import DescribeInSource, name_of
from rljob_reward.worker.entrypoints import BoundFunction, Found, Named, list_defined, list_own
from rljob_reward.worker.environments import LoadedEnvironment
from rljob_reward.worker.episodes import calls
from rljob_reward.worker.episodes.calls import Play
from rljob_reward.worker.episodes.ending import Waiter
from rljob_reward.worker.episodes.program import Program, from_function, from_object
from rljob_reward.worker.episodes.types import Episode
from rljob_reward.worker.settings import FunctionSettings

_OWN_MODULES: Final = (environments.__name__, "rljob_reward.worker.command")
"""Of the reward image, for an environment by its id and for a command: what they make plays episodes."""
_MAX_NAME_CHARACTERS: Final = 100


def find(module: types.ModuleType, settings: FunctionSettings) -> Found:
    """Return the entry point. Raise UserError, with what the source defines, if it has none."""
    own = list_own(module, settings)
    if settings.entrypoint is not None:
        candidates = list_defined(module, [settings.entrypoint])
    elif settings.framework:
        adapter = environments.find_adapter(settings.framework)
        candidates = [(name, value) for name, value in own if adapter.is_environment(name, value)]
    else:
        candidates = _find_program(module, own)
    if candidates:
        return Found(*candidates[0])
    defined = [name for name, value in own if inspect.isfunction(value) or inspect.isclass(value)]
    if settings.framework:
        problem = episode_forms.describe_missing_environment(settings.entrypoint, settings.framework, defined)
    else:
        problem = episode_forms.describe_missing_program(settings.entrypoint, defined)
    raise UserError(f"{settings.path}:1: {problem}")


def _find_program(module: types.ModuleType, own: Named) -> Named:
    classes = ((name, value) for name, value in own if inspect.isclass(value))
    found = list_defined(module, [episode_forms.RUN])
    return found or [(name, value) for name, value in classes if episode_forms.is_program_class(dir(value))]


def bind(found: Found, settings: FunctionSettings, path: str, in_source: DescribeInSource) -> BoundFunction:
    """Bind what plays the episodes. Raise FormError if it cannot be called. User code runs: a factory, a constructor,
    whatever makes an environment."""
    name = _name(found, settings)
    play, signature = _bind(found, settings, in_source)
    return BoundFunction(None, None, name, signature, path, calls=calls.bind(play, name))


def _name(found: Found, settings: FunctionSettings) -> str:
    if settings.module in _OWN_MODULES and settings.factory_args:
        return str(settings.factory_args.get("id") or " ".join(settings.factory_args["command"])[:_MAX_NAME_CHARACTERS])
    return name_of(found.value, found.name)


def _bind(found: Found, settings: FunctionSettings, in_source: DescribeInSource) -> tuple[Play, str]:
    arguments = settings.factory_args or {}
    if settings.module in _OWN_MODULES:
        made = found.value(**arguments)
        return (_play_with(made), settings.framework) if isinstance(made, LoadedEnvironment) else (made.play, "command")
    if settings.framework:
        return _play_with(environments.adopt(settings.framework, found.value, arguments)), settings.framework
    return _bind_program(found, settings, in_source).play, episode_forms.RUN


def _bind_program(found: Found, settings: FunctionSettings, in_source: DescribeInSource) -> Program:
    name, value = found
    if settings.factory_args is not None and not inspect.isclass(value):
        forms.check_factory(inspection.describe(name, value, in_source), settings.factory_args)
        value = value(**settings.factory_args)
    described = inspection.describe(name, value, in_source)
    plan = episode_forms.plan_program(described, settings.kwargs, settings.factory_args)
    if plan.kind == "function":
        assert isinstance(described, Function)
        return from_function(value, described, settings.kwargs)
    return from_object(value(**plan.arguments) if inspect.isclass(value) else value, name)


def _play_with(loaded: LoadedEnvironment) -> Play:
    def play(episode: Episode, waiter: Waiter) -> Any:
        from rljob_reward.worker.environments.model import ChatModel

        model = ChatModel(episode.access, episode.deadline_seconds)
        try:
            return waiter.wait(loaded.play(episode, model))
        finally:
            model.close()

    return play
