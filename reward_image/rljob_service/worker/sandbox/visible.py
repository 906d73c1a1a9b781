"""What a worker with a private /tmp still sees of the machine's: its interpreter, and what the job names.

All of it is read-only, and so is what lies next to it. Code of the policy sees the interpreter alone. Standard library
only.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from rljob_service.worker.process.scratch import is_temporary
from rljob_service.worker.sandbox.private_folders import TEMPORARY
from rljob_service.worker.settings import FunctionSettings


def find_visible(settings: FunctionSettings, scratch: str, modules: str) -> Iterator[str]:
    """Yield the paths. `scratch`: the worker's own directory, which stays writable. `modules`: see WorkerSandbox."""
    yield from filter(None, (modules, sys.prefix, sys.base_prefix, *sys.path))
    if settings.runs_code_of_policy:
        return
    environment = [value for value in os.environ.values() if not value.startswith(scratch)]
    source = [settings.path, os.path.dirname(settings.path)] if os.path.isabs(settings.path) else []
    for path in (*source, *settings.folders, *find_paths([settings.kwargs, settings.factory_args, environment])):
        # What the job names may need files next to it: all that is below the same entry of /tmp.
        top = "/".join(path.split("/")[:3])
        if path.startswith(f"{TEMPORARY}/") and not is_temporary(top):
            yield top
    if TEMPORARY in source:
        yield from _find_modules(TEMPORARY)


def find_paths(value: Any) -> Iterator[str]:
    """Yield the absolute paths in a value as JSON has it."""
    if isinstance(value, str) and value.startswith("/"):
        yield from value.split(os.pathsep)
    elif isinstance(value, dict):
        yield from find_paths(list(value.values()))
    elif isinstance(value, list):
        for each in value:
            yield from find_paths(each)


def _find_modules(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py") or os.path.exists(f"{entry.path}/__init__.py"):
                yield entry.path
