"""The program or the environment that a runner serves: which name it has in the source, and how it is bound.

Apart from the other entry points, whose workers do not import this. Raises UserErrors and FormErrors; loading adds the
place. Standard library only.

A program is `run`, as a function or a method, called by parameter names with what an episode has. A class is made once
for each process. Its `setup` is called before each episode and its `close` after it, however it ended. All three may be
async.

A program gets an OpenAI client as `client`, where the package openai is installed. Each episode has its own client,
with its own key and connections. They share what costs 20 ms of CPU time to make and has nothing of an episode: the
certificates that they trust.
"""

import contextlib
import copy
import functools
import importlib
import inspect
import ssl
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from rljob_api.errors import UserError
from rljob_api.functions import forms, named_forms
from rljob_api.functions.descriptions import Function
from rljob_api.functions.named_forms import CLIENT, CLOSE, RUN, SETUP
from rljob_service.worker import environments
from rljob_service.worker.environments import LoadedEnvironment
from rljob_service.worker.episodes import calls, rows
from rljob_service.worker.episodes.calls import Player
from rljob_service.worker.episodes.ending import Waiter
from rljob_service.worker.episodes.rows import ROWS, List
from rljob_service.worker.episodes.types import Episode
from rljob_service.worker.forms import inspection
from rljob_service.worker.forms.binding import NOT_ASYNC, is_coroutine_function
from rljob_service.worker.forms.inspection import name_of, read_parameters
from rljob_service.worker.load.entrypoints import BoundFunction, Found, Named, list_defined, list_own
from rljob_service.worker.settings import MODULE_NAME, FunctionSettings

_ROW_OVERRIDES = ("question", "answer", "ground_truth", "data_source")
"""Values that a column with the parameter's name replaces."""
_HAS_STEPS = (
    "its setup and close keep what belongs to one episode in one object: do their work in run, such as with `async "
    "with`, or remove episodesPerProcess"
)


class Step(NamedTuple):
    """A function that an episode calls."""

    function: Callable[..., Any]
    parameters: Function
    kwargs: Mapping[str, Any]
    """Passed to each call."""
    openai: types.ModuleType | None
    """The package, if the function takes a client."""

    @property
    def is_async(self) -> bool:
        return is_coroutine_function(self.function)

    def select(self, episode: Episode, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that it takes. Raise UserError if the row lacks one."""
        missing = [name for name in self.parameters.required if name not in given]
        if missing:
            columns = ", ".join(episode.columns) or "none"
            raise UserError(
                f"{self.parameters.show()} requires {', '.join(missing)}, which the row does not have (its other "
                f"columns: {columns}); it may take {', '.join(named_forms.PROGRAM_VALUES)}"
            )
        return {name: value for name, value in given.items() if self.parameters.accepts(name)}


def make_step(parameters: Function, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Step:
    """Return the step. Raise UserError if it requires a client and there is none."""
    package = find_package() if CLIENT in parameters.named and CLIENT not in kwargs else None
    if package is None and CLIENT in parameters.required and CLIENT not in kwargs:
        raise UserError(
            f"{parameters.show()} takes client, which needs the package openai; add it to runner.function.requirements "
            "or to the runner's image"
        )
    return Step(function, parameters, kwargs, package)


class Program(NamedTuple):
    """Plays episodes with what the source of a program defines."""

    run: Step
    setup: Step | None = None
    close: Step | None = None
    list_rows: List | None = None
    """Its own rows; None: it has none."""

    def play(self, episode: Episode, waiter: Waiter) -> Any:
        """Return what `run` returned."""
        values = list_values(episode)
        try:
            if self.setup is not None:
                self._call(self.setup, values, episode, waiter)
            value = self._call(self.run, values, episode, waiter)
        except BaseException:
            with contextlib.suppress(Exception):  # how the episode failed says more
                self._tear_down(values, episode, waiter)
            raise
        self._tear_down(values, episode, waiter)
        return value

    def _tear_down(self, values: dict[str, Any], episode: Episode, waiter: Waiter) -> None:
        waiter.begin_teardown()
        if self.close is not None:
            self._call(self.close, values, episode, waiter)

    def _call(self, step: Step, values: dict[str, Any], episode: Episode, waiter: Waiter) -> Any:
        given = {**values, **step.kwargs}
        with _open_client(step, episode, waiter) as opened:
            return waiter.wait(step.function(**step.select(episode, {**given, **opened})))

    def player(self) -> Player:
        if not self.run.is_async:
            return Player(self.play, alone=NOT_ASYNC)
        if self.setup is not None or self.close is not None:
            return Player(self.play, alone=_HAS_STEPS)
        return Player(self.play, self._play_shared)

    async def _play_shared(self, episode: Episode) -> Any:
        """Play one of several episodes in the event loop that runs."""
        step, given = self.run, {**list_values(episode), **self.run.kwargs}
        if step.openai is None:
            return await step.function(**step.select(episode, given))
        async with make(step.openai, episode, is_async=True) as opened:
            return await step.function(**step.select(episode, {**given, CLIENT: opened}))


@contextlib.contextmanager
def _open_client(step: Step, episode: Episode, waiter: Waiter) -> Iterator[dict[str, Any]]:
    """Yield the client as an argument, if the step takes one."""
    if step.openai is None:
        yield {}
        return
    opened = make(step.openai, episode, is_async=step.is_async)
    try:
        yield {CLIENT: opened}
    finally:
        with contextlib.suppress(Exception):
            waiter.wait(opened.close())


def list_values(episode: Episode) -> dict[str, Any]:
    """Return what named_forms.PROGRAM_VALUES names, except the client, and the columns of the row."""
    own = {
        "question": episode.question,
        "answer": episode.ground_truth,
        "ground_truth": episode.ground_truth,
        "data_source": episode.data_source,
    }
    columns = episode.columns
    task = {"prompt": episode.prompt, "messages": copy.deepcopy(episode.prompt), **own, **columns}
    row = {**own, **{name: value for name, value in columns.items() if name in _ROW_OVERRIDES}}
    return {
        **columns,
        **row,
        "prompt": episode.prompt,
        "messages": copy.deepcopy(episode.prompt),
        "extra_info": columns,
        **dict.fromkeys(("task", "data", "example"), task),
        "base_url": episode.access.base_url,
        "api_key": episode.access.api_key,
        "model": episode.access.name,
        "seed": episode.seed,
        "attempt": episode.attempt,
        "episode": episode.id,
        "max_turns": episode.max_turns,
        "seats": list(episode.seats or ()),
    }


def from_object(made: Any, name: str) -> Program:
    """Return the program of an object with `run`, or with `__call__`."""

    def find(method: str) -> Step | None:
        function = getattr(made, method, None)
        return make_step(read_parameters(f"{name}.{method}", function), function, {}) if callable(function) else None

    run = find(RUN) or make_step(read_parameters(name, made), made, {})
    list_rows = getattr(made, ROWS, None)
    return Program(run, find(SETUP), find(CLOSE), list_rows if callable(list_rows) else None)


def find_package() -> types.ModuleType | None:
    """Return openai; None if it is not installed. The first import takes about a second."""
    try:
        return importlib.import_module("openai")
    except ModuleNotFoundError:
        return None


def make(package: types.ModuleType, episode: Episode, *, is_async: bool) -> Any:
    """Return an OpenAI, or an AsyncOpenAI. An answer may take until the episode's deadline: a weight update waits."""
    kind = package.AsyncOpenAI if is_async else package.OpenAI
    transport = package.DefaultAsyncHttpxClient if is_async else package.DefaultHttpxClient
    access = episode.access
    return kind(
        base_url=access.base_url,
        api_key=access.api_key,
        timeout=episode.deadline_seconds,
        http_client=transport(verify=_trusted_certificates()),
    )


@functools.cache
def _trusted_certificates() -> ssl.SSLContext:
    """Return what each client would load. The gateway itself speaks plain HTTP."""
    return ssl.create_default_context()


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
        problem = named_forms.describe_missing_environment(settings.entrypoint, settings.framework, defined)
    else:
        problem = named_forms.describe_missing_program(settings.entrypoint, defined)
    raise UserError(f"{settings.path}:1: {problem}")


def _find_program(module: types.ModuleType, own: Named) -> Named:
    classes = ((name, value) for name, value in own if inspect.isclass(value))
    found = list_defined(module, [named_forms.RUN])
    return found or [(name, value) for name, value in classes if RUN in dir(value)]


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
    return program.player(), named_forms.RUN, program.list_rows


def _bind_program(found: Found, settings: FunctionSettings) -> Program:
    name, value = found
    if settings.factory_args is not None and not inspect.isclass(value):
        forms.check_factory(inspection.describe(name, value), settings.factory_args)
        value = value(**settings.factory_args)
    described = inspection.describe(name, value)
    plan = named_forms.plan_program(described, settings.kwargs, settings.factory_args)
    if isinstance(described, Function):
        return Program(make_step(described, value, settings.kwargs))
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
