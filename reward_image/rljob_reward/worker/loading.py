"""From source text to a bound function, inside a worker process.

Owns the errors of a user's file: each is a UserError of one or two lines with file:line and a remedy. The adapters
choose the convention. Standard library only.
"""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import itertools
import linecache
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from rljob_api.errors import UserError
from rljob_reward.worker import adapters
from rljob_reward.worker.adapters import sample_then_group
from rljob_reward.worker.adapters.binding import Binding
from rljob_reward.worker.sandbox import seccomp
from rljob_reward.worker.settings import FunctionSettings

_MAX_CAUSES = 100
_MODULE_NAME = "rljob_reward_function"
DEFAULT_ENTRYPOINTS = ("compute_score", "reward_func", "reward")
_SCORER_CLASS_REMEDY = "is a class that scores samples and groups; set scope: sampleThenGroup"


class BoundFunction(NamedTuple):
    sample: Binding | None
    group: Binding | None
    entrypoint: str
    signature: str
    path: str
    """File named in errors."""


def load(settings: FunctionSettings) -> BoundFunction:
    """Run the source, or import the module, and bind its function. Raise UserError for errors in it."""
    module = _execute(settings)
    path = getattr(module, "__file__", None) or settings.path
    if settings.scope == "sampleThenGroup":
        return _bind_class(_find_class(module, settings), settings, path)
    found_as, function = _find(module, settings)
    name = getattr(function, "__name__", found_as)
    place = f"{_place_of(function, path)}: {name}"
    for_groups = settings.scope == "group"
    adapter = adapters.choose_adapter(function, settings.signature, place, for_groups=for_groups)
    binding = adapter.bind(function, settings.kwargs, place)
    sample, group = (None, binding) if for_groups else (binding, None)
    return BoundFunction(sample, group, name, adapter.name, path)


def _bind_class(cls: type, settings: FunctionSettings, path: str) -> BoundFunction:
    try:
        instance = cls(**settings.kwargs)
    except (Exception, SystemExit) as error:
        hint = describe_limit(error, settings) or f" (while {cls.__name__} was created with function.kwargs)"
        raise UserError(f"{explain(error, path)}{hint}") from error
    sample, group = sample_then_group.bind(instance, f"{path}: {cls.__name__}")
    return BoundFunction(sample, group, cls.__name__, sample_then_group.NAME, path)


def _execute(settings: FunctionSettings) -> types.ModuleType:
    path = settings.path
    try:
        return importlib.import_module(settings.module) if settings.module else _run(settings)
    except SyntaxError as error:
        text = (error.text or "").strip()
        place = f"{error.filename or path}:{error.lineno}"
        raise UserError(f"{place}: {type(error).__name__}: {error.msg}: {text}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{explain(error, path)}{_remedy(error, settings)}") from error


def _run(settings: FunctionSettings) -> types.ModuleType:
    path = settings.path
    code = compile(settings.source, path, "exec", dont_inherit=True)
    module = types.ModuleType(_MODULE_NAME)
    module.__file__ = path
    # Pickling (multiprocessing), dataclasses and tracebacks need these entries.
    sys.modules[_MODULE_NAME] = module
    linecache.cache[path] = (len(settings.source), None, settings.source.splitlines(keepends=True), path)
    if os.path.isabs(path):
        sys.path.insert(0, os.path.dirname(path))
    exec(code, module.__dict__)
    return module


def _remedy(error: BaseException, settings: FunctionSettings) -> str:
    if hint := describe_limit(error, settings):
        return hint
    if isinstance(error, ModuleNotFoundError):
        return "; add its package to function.requirements, or install it into the reward's image (rewards[].image)"
    if isinstance(error, (OSError, ImportError)):
        return f"; if memory ran out: function.maxMemoryMiB is {settings.max_memory_mib} MiB of address space"
    return " (while the file was imported)"


def describe_limit(error: BaseException, settings: FunctionSettings) -> str:
    """Return the field of the function whose limit causes this error; empty if none does."""
    for cause in itertools.islice(_chain(error), _MAX_CAUSES):  # user code can make it a circle
        if isinstance(cause, MemoryError):
            return f" (maxMemoryMiB is {settings.max_memory_mib} MiB of address space)"
        if not isinstance(cause, OSError):
            continue
        if cause.errno == seccomp.BLOCKED_ERRNO:
            return " (function.network is false)"
        if cause.errno == errno.EFBIG:
            return f" (function.maxFileMiB is {settings.max_file_mib})"
        if cause.errno == errno.EACCES and cause.filename is not None:
            return " (a function may write only to its scratch directory, $TMPDIR)"
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes: libraries wrap errors."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _find(module: types.ModuleType, settings: FunctionSettings) -> tuple[str, Callable[..., Any]]:
    names = (settings.entrypoint,) if settings.entrypoint else DEFAULT_ENTRYPOINTS
    for name in names:
        function = getattr(module, name, None)
        if function is None:
            continue
        if sample_then_group.is_scorer_class(function):
            raise UserError(f"{settings.path}: {name} {_SCORER_CLASS_REMEDY}")
        if not callable(function) or inspect.isclass(function):
            raise UserError(f"{settings.path}: {name} is a {type(function).__name__}, not a function")
        return name, function
    defined = [name for name, value in _own(module, settings) if inspect.isfunction(value) and name[0] != "_"]
    remedy = f"it defines {', '.join(defined)}, set function.entrypoint" if defined else "it defines no function"
    classes = [name for name, value in _own(module, settings) if sample_then_group.is_scorer_class(value)]
    if classes and not settings.entrypoint:
        remedy = f"{classes[0]} {_SCORER_CLASS_REMEDY}"
    raise UserError(f"{settings.path}: no function {' or '.join(names)}; {remedy}")


def _find_class(module: types.ModuleType, settings: FunctionSettings) -> type:
    methods = " and ".join(sample_then_group.METHODS)
    name = settings.entrypoint
    candidates = [getattr(module, name, None)] if name else [value for _, value in _own(module, settings)]
    for candidate in filter(sample_then_group.is_scorer_class, candidates):
        return cast(type, candidate)
    problem = f"{name} is not a class with {methods}" if name else f"no class with {methods}"
    defined = [name for name, value in _own(module, settings) if inspect.isclass(value)]
    found_instead = f"it defines {', '.join(defined)}" if defined else "it defines no class"
    raise UserError(f"{settings.path}: {problem}, which scope: sampleThenGroup needs; {found_instead}")


def _own(module: types.ModuleType, settings: FunctionSettings) -> list[tuple[str, Any]]:
    """Return what a module defines, in its order, without what it imports."""
    own = settings.module or _MODULE_NAME
    named = [(name, value, getattr(value, "__module__", None) or "") for name, value in vars(module).items()]
    return [(name, value) for name, value, home in named if home == own or home.startswith(f"{own}.")]


def _place_of(function: Any, path: str) -> str:
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inner.func
    code = getattr(inner, "__code__", None)
    return f"{path}:{code.co_firstlineno}" if code and code.co_filename == path else path


def explain(error: BaseException, path: str) -> str:
    """Return an exception as one line: place in the user's file, type, message. For a group: the first one."""
    if isinstance(error, BaseExceptionGroup):
        return f"{explain(error.exceptions[0], path)} (the first of {len(error.exceptions)})"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    place = f"{path}:{lines[-1]}" if lines else path
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be shown)"
    return f"{place}: {type(error).__name__}: {text}" if text else f"{place}: {type(error).__name__}"
