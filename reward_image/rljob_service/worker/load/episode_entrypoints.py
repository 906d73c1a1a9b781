"""The program or the environment that a runner serves: which name it has in the source, and how it is bound.

Apart from the other entry points, whose workers do not import this. Raises UserErrors and FormErrors; loading adds the
place. Standard library only.
"""

import inspect
import sys
import types
from functools import partial
from typing import Any, Final

from rljob_api.errors import UserError
from rljob_api.functions import episode_forms, forms
from rljob_api.functions.descriptions import Function
from rljob_service.worker import environments
from rljob_service.worker.environments import LoadedEnvironment
from rljob_service.worker.episodes import calls, rows
from rljob_service.worker.episodes.calls import Player
from rljob_service.worker.episodes.ending import Waiter
from rljob_service.worker.episodes.program import Program, from_function, from_object
from rljob_service.worker.episodes.rows import List
from rljob_service.worker.episodes.types import Episode
from rljob_service.worker.forms import inspection
from rljob_service.worker.forms.inspection import name_of
from rljob_service.worker.load.entrypoints import BoundFunction, Found, Named, list_defined, list_own
from rljob_service.worker.settings import MODULE_NAME, FunctionSettings

_ENVIRONMENT_BY_ID: Final = environments.__name__
_COMMAND: Final = "rljob_service.worker.episodes.command"
"""Modules of the reward image, in the place of the user's."""
_MAX_NAME_CHARACTERS: Final = 100
_IS_COMMAND: Final = "a command is a process of each episode; remove episodesPerProcess"
_NOT_ASYNC_FRAMEWORK: Final = (
    "its steps are not async, as in most frameworks, or it has servers of its own (start, stop) for one episode at a "
    "time; remove episodesPerProcess"
)


def find(module: types.ModuleType, settings: FunctionSettings) -> Found:
    """Return the entry point. Raise UserError, with what the source defines, if it has none."""
    own = list_own(module, settings)
    if settings.entrypoint is not None:
        candidates = list_defined(module, [settings.entrypoint])
    elif settings.framework:
        adapter = environments.load_adapter(settings.adapter)
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


def bind(found: Found, settings: FunctionSettings, path: str) -> BoundFunction:
    """Bind what plays the episodes. Raise FormError if it cannot be called. User code runs: a factory, a constructor,
    whatever makes an environment."""
    name = _name(found, settings)
    player, signature, list_rows = _bind(found, settings)
    list_rows = _find_own_rows(settings) or list_rows or partial(_have_no_rows, name)
    return BoundFunction(None, None, name, signature, path, calls=calls.bind(player, name, list_rows))


def _find_own_rows(settings: FunctionSettings) -> List | None:
    """Return the function `rows` of the user's source, if it has one."""
    if settings.module in (_ENVIRONMENT_BY_ID, _COMMAND):
        return None
    own = getattr(sys.modules.get(settings.module or MODULE_NAME), rows.ROWS, None)
    return own if callable(own) else None


def _have_no_rows(name: str, split: str) -> Any:
    raise UserError(rows.describe_missing(name))


def _name(found: Found, settings: FunctionSettings) -> str:
    if settings.module in (_ENVIRONMENT_BY_ID, _COMMAND) and settings.factory_args:
        return str(settings.factory_args.get("id") or " ".join(settings.factory_args["command"])[:_MAX_NAME_CHARACTERS])
    return name_of(found.value, found.name)


def _bind(found: Found, settings: FunctionSettings) -> tuple[Player, str, List | None]:
    """Return what plays episodes, its form, and what has its rows."""
    arguments = settings.factory_args or {}
    if settings.module == _COMMAND:
        return Player(found.value(**arguments).play, alone=_IS_COMMAND), "command", None
    if settings.framework:
        adapter = environments.load_adapter(settings.adapter)
        if settings.module == _ENVIRONMENT_BY_ID:
            loaded = environments.make(adapter, **arguments)
        else:
            loaded = environments.adopt(adapter, found.value, arguments)
        environments.check_seats(loaded, settings.framework, settings.seats)
        return _play_with(loaded), settings.framework, loaded.list_rows
    program = _bind_program(found, settings)
    return program.player(), episode_forms.RUN, program.list_rows


def _bind_program(found: Found, settings: FunctionSettings) -> Program:
    name, value = found
    if settings.factory_args is not None and not inspect.isclass(value):
        forms.check_factory(inspection.describe(name, value), settings.factory_args)
        value = value(**settings.factory_args)
    described = inspection.describe(name, value)
    plan = episode_forms.plan_program(described, settings.kwargs, settings.factory_args)
    if plan.kind == "function":
        assert isinstance(described, Function)
        return from_function(value, described, settings.kwargs)
    return from_object(value(**plan.arguments) if inspect.isclass(value) else value, name)


def _play_with(loaded: LoadedEnvironment) -> Player:
    def play(episode: Episode, waiter: Waiter) -> Any:
        from rljob_service.worker.environments.model import ChatModel

        model = ChatModel(episode.access, episode.deadline_seconds)
        try:
            return waiter.wait(loaded.play(episode, model))
        finally:
            model.close()

    async def play_shared(episode: Episode) -> Any:
        from rljob_service.worker.environments.model import ChatModel

        model = ChatModel(episode.access, episode.deadline_seconds)
        try:
            value = loaded.play(episode, model)
            return await value if inspect.isawaitable(value) else value
        finally:
            model.close()

    return Player(play, play_shared) if loaded.is_async else Player(play, alone=_NOT_ASYNC_FRAMEWORK)
