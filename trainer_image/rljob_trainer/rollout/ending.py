"""The end of vLLM's engine, when it is wanted: without the traceback that vLLM logs for an engine that died.

Invariant: an end without a signal is logged as before, and is a failure. vLLM's server returns alike after both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_ENGINE_LOG = "vllm.v1.engine.async_llm"


class _EndIsWanted(logging.Filter):
    """Drops errors of a dead engine."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return type(error).__name__ != "EngineDeadError"


def is_wanted() -> bool:
    """Whether the engine was terminated."""
    return any(isinstance(each, _EndIsWanted) for each in logging.getLogger(_ENGINE_LOG).filters)


def quiet_shutdown(shutdown: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap AsyncLLM.shutdown. It ends the engine before the task that reads from it, which then takes it for dead."""

    def wanted(timeout: float | None = None) -> Any:
        if not is_wanted():
            logging.getLogger(_ENGINE_LOG).addFilter(_EndIsWanted())
        return shutdown(timeout=timeout)

    return wanted
