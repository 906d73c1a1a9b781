"""From source text to a bound function, inside a worker process.

Owns the errors of a user's file: each is a UserError of one or two lines with file:line and a remedy. The adapters
choose the convention, entrypoints what is served. Standard library only.
"""

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
from typing import Any

from rljob_api.errors import UserError
from rljob_api.functions import remedies
from rljob_api.functions.forms import FormError
from rljob_api.quantity import format_bytes
from rljob_service.worker import sandbox
from rljob_service.worker.load import entrypoints
from rljob_service.worker.load.entrypoints import BoundFunction
from rljob_service.worker.sandbox import seccomp
from rljob_service.worker.settings import EPISODES, MODULE_NAME, SCORE, SERVES, FunctionSettings

_MAX_CAUSES = 100
_NO_ADDRESS_SPACE = ("failed to map segment", "cannot map zero-fill pages", "cannot allocate memory")
"""What the loader of libraries says above the limit."""
_BOM = "\ufeff"
_FIELDS = {
    "rljob_service.worker.episodes.command": "agent.runner.command",
    "rljob_service.worker.environments": "agent.environment.id",
}
"""Modules of the image that run what a field names: errors name the field in place of a file."""
_OWN_FOLDER = os.path.dirname(os.path.abspath(sandbox.__path__[0])) + os.sep
"""Folder of all code of a worker."""
_OWN_FILES = "name a file next to the source as pathlib.Path(__file__).parent / NAME, or by an absolute path"
_IMAGES = ("rewards[].image", "agent.user.image", "agent.tools[].image", "agent.runner.image")
"""In the order of SERVES."""
_CLIENTS = ("openai", "anthropic")
"""Packages whose clients read the addresses and keys of an episode when they are made."""


def load(settings: FunctionSettings) -> BoundFunction:
    """Run the source, or import the module, and bind its function. Raise UserError for errors in it."""
    if settings.serves == SCORE:
        find, bind = entrypoints.find, entrypoints.bind
    elif settings.serves == EPISODES:
        from rljob_service.worker import environments
        from rljob_service.worker.load import episode_entrypoints

        if settings.framework:
            environments.load_adapter(settings.adapter)  # it may provide modules that the source imports
        find, bind = episode_entrypoints.find, episode_entrypoints.bind
    else:
        from rljob_service.worker.load import agent_entrypoints  # here, since workers of rewards do not need it

        find, bind = agent_entrypoints.find, agent_entrypoints.bind
    module = _execute(settings)
    path = _FIELDS.get(settings.module or "") or getattr(module, "__file__", None) or settings.path
    found = find(module, settings)

    try:
        bound = bind(found, settings, path)
        if settings.is_shared and bound.alone:
            what = f"{bound.entrypoint} cannot share a process (episodesPerProcess is {settings.per_process})"
            raise UserError(f"{_place_of(found.value, path)}: {what}: {bound.alone}")
        return bound
    except FormError as error:
        place = _place_of(getattr(error, "function", found.value), path)
        raise UserError(f"{place}: {error}") from None
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if path in _FIELDS.values():
            remedy = describe_limit(error, settings) or _add_package(error)
            raise UserError(f"{explain(error, path)}{remedy}") from error
        called = f" (while {found.name} was called with its function.{_given(settings)})"
        raise UserError(f"{explain(error, path)}{describe_limit(error, settings) or called}") from error


def _add_package(error: BaseException) -> str:
    return "; add its package to agent.environment.packages" if isinstance(error, ModuleNotFoundError) else ""


def _given(settings: FunctionSettings) -> str:
    return "kwargs" if settings.scope == "sampleThenGroup" or settings.serves != SCORE else "factoryArgs"


def _execute(settings: FunctionSettings) -> types.ModuleType:
    path = settings.path
    try:
        return importlib.import_module(settings.module) if settings.module else _run(settings)
    except SyntaxError as error:
        text = (error.text or "").strip()
        place = f"{error.filename or path}:{error.lineno}"
        raise UserError(f"{place}: {type(error).__name__}: {error.msg}: {text}") from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{explain(error, path)}{_remedy(error, settings)}") from error


def _run(settings: FunctionSettings) -> types.ModuleType:
    path = settings.path
    code = compile(settings.source.removeprefix(_BOM), path, "exec", dont_inherit=True)
    if training := remedies.find_training(settings.source):
        raise UserError(f"{path}:{training[0]}: {training[1]}")
    module = types.ModuleType(MODULE_NAME)
    module.__file__ = path
    # Pickling (multiprocessing), dataclasses and tracebacks need these entries.
    sys.modules[MODULE_NAME] = module
    linecache.cache[path] = (len(settings.source), None, settings.source.splitlines(keepends=True), path)
    if os.path.isabs(path):
        sys.path.insert(0, os.path.dirname(path))
        module.__package__, top = _find_package(path)
        sys.path.append(top)
    exec(code, module.__dict__)
    return module


def _find_package(path: str) -> tuple[str, str]:
    """Return the package that a file is a part of, and the folder with it: its folder, and those above it while they
    have an __init__.py."""
    folder, name = os.path.split(os.path.dirname(path))
    names = [name]
    while os.path.exists(os.path.join(folder, "__init__.py")):
        folder, name = os.path.split(folder)
        names.insert(0, name)
    return ".".join(names), folder


def _remedy(error: BaseException, settings: FunctionSettings) -> str:
    if hint := describe_limit(error, settings):
        return hint
    if isinstance(error, ModuleNotFoundError):
        image = _IMAGES[SERVES.index(settings.serves)]
        return f"; add its package to function.requirements or to {image}, or its folder to PYTHONPATH in env"
    if settings.serves == EPISODES and type(error).__module__.partition(".")[0] in _CLIENTS:
        return "; create clients in run(): their addresses and keys exist only during an episode"
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "; a file is a part of a package as far as the folders above it have an __init__.py"
    memory = format_bytes(settings.max_memory_bytes)
    if any(each in str(error) for each in _NO_ADDRESS_SPACE):
        return (
            f"; its libraries need more address space than function.maxMemory, {memory}: raise it, for torch to 16Gi. "
            "It is reserved, not used"
        )
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return f"; function.maxMemory is {memory} of address space"
    return " (while the file was imported)"


def describe_limit(error: BaseException, settings: FunctionSettings) -> str:
    """Return the field of the function whose limit causes this error; empty if none does."""
    for cause in itertools.islice(_chain(error), _MAX_CAUSES):  # user code can make it a circle
        if isinstance(cause, MemoryError):
            return f" (maxMemory is {format_bytes(settings.max_memory_bytes)} of address space)"
        if isinstance(cause, KeyError) and traceback.extract_tb(cause.__traceback__)[-1].filename == "<frozen os>":
            return " (it does not get the variables of your shell: set it in env, or a key as a Secret in template)"
        is_missing = isinstance(cause, FileNotFoundError) and not os.path.isabs(str(cause.filename))
        if is_missing or "unable to open database file" in str(cause):
            return f" (its working folder is a scratch folder: {_OWN_FILES})"
        if not isinstance(cause, OSError):
            continue
        if cause.errno == errno.ECONNREFUSED:
            return " (nothing listens there; a service of this job runs in its own Pod, with a localhost of its own)"
        if cause.errno == seccomp.BLOCKED_ERRNO:
            return " (function.network is false)"
        if cause.errno == errno.EFBIG:
            return f" (function.maxFileSize is {format_bytes(settings.max_file_bytes)})"
        if cause.errno in (errno.EACCES, errno.EROFS) and cause.filename is not None:
            return " (a function may write only to its scratch directory, $TMPDIR, and to its own /tmp)"
        if cause.errno == errno.ENOENT and str(cause.filename).startswith("/tmp/") and sandbox.has_private_temporary():
            return " (a function has its own /tmp, with what the job names there, and not this machine's)"
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes: libraries wrap errors."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _place_of(value: Any, path: str) -> str:
    """Return FILE:LINE of a function, or of the class of an object; the file alone if another one has it."""
    code = getattr(inspect.unwrap(getattr(value, "func", value)), "__code__", None)
    if code is not None:
        return f"{path}:{code.co_firstlineno}" if code.co_filename == path else path
    cls = value if inspect.isclass(value) else type(value)
    try:
        return f"{path}:{inspect.getsourcelines(cls)[1]}" if inspect.getfile(cls) == path else path
    except (OSError, TypeError):  # a class without source
        return path


def explain(error: BaseException, path: str) -> str:
    """Return an exception as one line: place in the user's file, type, message. For a group: the first one."""
    if isinstance(error, BaseExceptionGroup):
        return f"{explain(error.exceptions[0], path)} (the first of {len(error.exceptions)})"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    place = f"{path}:{lines[-1]}" if lines else path
    if path in _FIELDS.values() and (others := [each for each in frames if not each.filename.startswith(_OWN_FOLDER)]):
        place = f"{path}: {others[-1].filename}:{others[-1].lineno}"
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be shown)"
    return f"{place}: {type(error).__name__}: {text}" if text else f"{place}: {type(error).__name__}"
