"""The settings of a function, sent to its workers at their start. Standard library only."""

from __future__ import annotations

from typing import Any, NamedTuple


class FunctionSettings(NamedTuple):
    """Everything that a worker needs to load a function. Field names enter the reward's version: do not rename them."""

    source: str
    path: str
    """Path of the source, for messages, tracebacks and imports of files next to it."""
    entrypoint: str | None
    signature: str
    kwargs: dict[str, Any]
    max_memory_mib: int
    module: str | None = None
    """An installed module instead of source."""
    max_file_mib: int = 256
    max_processes: int = 128
    network: bool = False
    cpu_seconds: int | None = None
    requirements: tuple[str, ...] = ()
    """Packages that are installed for `python`."""
    python: str = ""
    """Interpreter with the requirements. Empty: the server's."""
    scratch: str = ""
    """Folder for the workers' directories. Empty: a temporary folder."""
    scope: str = "sample"
    """sample, group, or sampleThenGroup."""
