"""How an episode waits and ends: awaitables in a separate event loop, and the signal that ends it early.

The server sends SIGTERM when an episode's time is over or its client has left, and kills the process
settings.TEARDOWN_SECONDS later. Until then `finally` blocks and `close` run. Invariant: outside an episode the signal
has its default action.
"""

from __future__ import annotations

import inspect
import signal
import types
from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

_MESSAGE = "the server ended the episode"


class Waiter:
    """Used as a context manager around one episode."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._is_closing = False

    def __enter__(self) -> Waiter:
        signal.signal(signal.SIGTERM, _end)
        return self

    def __exit__(self, *error: object) -> None:
        self.begin_teardown()
        try:
            if self._runner is not None:
                self._runner.close()  # cancels the tasks that the episode left
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def wait(self, value: Any) -> Any:
        """Return the value; of an awaitable its result. All awaitables of an episode share an event loop."""
        if not inspect.isawaitable(value):
            return value
        if self._runner is None:
            import asyncio  # here, since sync programs do not need it

            self._runner = asyncio.Runner()
        try:
            return self._runner.run(self._await(value))
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN if self._is_closing else _end)

    def begin_teardown(self) -> None:
        """From now on the signal does not interrupt what runs."""
        self._is_closing = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    async def _await(self, value: Awaitable[Any]) -> Any:
        import asyncio

        task = asyncio.current_task()
        assert task is not None
        if not self._is_closing:
            signal.signal(signal.SIGTERM, partial(_end_task, asyncio.get_running_loop(), task))
        return await value


def _end(number: int, frame: types.FrameType | None) -> None:
    raise SystemExit(_MESSAGE)


def _end_task(
    loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any], number: int, frame: types.FrameType | None
) -> None:
    """End what runs. A coroutine may block, such as in a request: then only an exception reaches it. While the loop
    waits, an exception would leave it without running the `finally` blocks: then the task is cancelled."""
    import asyncio

    if asyncio.current_task(loop) is not None:
        raise SystemExit(_MESSAGE)
    loop.call_soon_threadsafe(task.cancel)
