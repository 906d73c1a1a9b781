"""From source text to a bound function, inside a worker process.

Owns the errors of a user's file: each is a UserError of one or two lines with file:line and a remedy. The adapters
choose the convention. Standard library only.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import itertools
import linecache
import os
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from rljob_api.errors import UserError
from rljob_api.functions import remedies
from rljob_api.functions.descriptions import DEFAULT_ENTRYPOINTS, Description
from rljob_api.functions.forms import FormError
from rljob_reward.worker import adapters
from rljob_reward.worker.adapters import sample_then_group
from rljob_reward.worker.adapters.binding import Binding
from rljob_reward.worker.adapters.inspection import name_of
from rljob_reward.worker.sandbox import seccomp
from rljob_reward.worker.settings import MODULE_NAME, FunctionSettings

_MAX_CAUSES = 100
_BOM = "\ufeff"


class BoundFunction(NamedTuple):
    sample: Binding | None
    group: Binding | None
    entrypoint: str
    signature: str
    path: str
    """File named in errors."""
    reads_tokens: bool = False
    """Whether it needs prompt_ids and completion_ids."""


def load(settings: FunctionSettings) -> BoundFunction:
    """Run the source, or import the module, and bind its function. Raise UserError for errors in it."""
    module = _execute(settings)
    path = getattr(module, "__file__", None) or settings.path
    name, value = _find(module, settings)
    place = _place_of(value, path)

    def in_source(name: str) -> Description:
        from rljob_api.functions.source import describe_in_source  # here, since few functions need it

        return describe_in_source(settings.source or _read_source(module), name)

    try:
        bound = adapters.bind(name, value, settings, settings.scope, in_source)
    except FormError as error:
        raise UserError(f"{place}: {error}") from None
    except (Exception, SystemExit) as error:
        hint = describe_limit(error, settings) or f" (while {name} was called with its function.{_given(settings)})"
        raise UserError(f"{explain(error, path)}{hint}") from error
    return BoundFunction(bound.sample, bound.group, name_of(value, name), bound.signature, path, bound.reads_tokens)


def _given(settings: FunctionSettings) -> str:
    return "kwargs" if settings.scope == "sampleThenGroup" else "factoryArgs"


def _read_source(module: types.ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


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
    code = compile(settings.source.removeprefix(_BOM), path, "exec", dont_inherit=True)
    module = types.ModuleType(MODULE_NAME)
    module.__file__ = path
    # Pickling (multiprocessing), dataclasses and tracebacks need these entries.
    sys.modules[MODULE_NAME] = module
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


def _find(module: types.ModuleType, settings: FunctionSettings) -> tuple[str, Any]:
    """Return the entry point. Raise UserError, with what the source defines, if it has none."""
    if settings.scope == "sampleThenGroup" and settings.entrypoint is None:
        own = _own(module, settings)
        found = [(name, value) for name, value in own if sample_then_group.is_scorer_class(value)]
    else:
        names = (settings.entrypoint,) if settings.entrypoint else DEFAULT_ENTRYPOINTS
        found = [(name, getattr(module, name)) for name in names if getattr(module, name, None) is not None]
    if found:
        return found[0]
    functions = [name for name, value in _own(module, settings) if inspect.isfunction(value)]
    classes = {name: dir(value) for name, value in _own(module, settings) if inspect.isclass(value)}
    problem = remedies.describe_missing_entrypoint(settings.entrypoint, settings.scope, functions, classes)
    raise UserError(f"{settings.path}:1: {problem}")


def _own(module: types.ModuleType, settings: FunctionSettings) -> list[tuple[str, Any]]:
    """Return what a module defines, in its order, without what it imports."""
    own = settings.module or MODULE_NAME
    named = [(name, value, getattr(value, "__module__", None) or "") for name, value in vars(module).items()]
    return [(name, value) for name, value, home in named if home == own or home.startswith(f"{own}.")]


def _place_of(value: Any, path: str) -> str:
    code = getattr(inspect.unwrap(getattr(value, "func", value)), "__code__", None)
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
