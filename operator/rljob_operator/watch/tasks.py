"""Ends all tasks that kopf starts, and runs cleanups to their end during a cancellation.

Works around two properties of kopf: when one watch fails, the tasks of the others keep running; and a watch that is
cancelled together with its children takes that for a pause. A TaskTree therefore knows which task started which.
Invariant: it cancels only tasks whose parent has ended. A living parent ends its own children, in its own order.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

Task = asyncio.Task[Any]
_T = TypeVar("_T")
_TREE: contextvars.ContextVar[TaskTree | None] = contextvars.ContextVar("task tree", default=None)
_RECANCEL_INTERVAL_SECONDS = 1.0
CANCEL_TIMEOUT_SECONDS = 15.0


class TaskTree:
    """The tasks that `create_task` starts, that those start, and so on."""

    def __init__(self) -> None:
        self._parents: dict[Task, Task | None] = {}

    def create_task(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        if not isinstance(factory := loop.get_task_factory(), _TrackingTaskFactory):
            loop.set_task_factory(_TrackingTaskFactory(factory))
        context.run(_TREE.set, self)
        return loop.create_task(work, context=context)

    @property
    def pending(self) -> set[Task]:
        return {task for task in self._parents if not task.done()}

    async def cancel_all(self, seconds: float = CANCEL_TIMEOUT_SECONDS) -> None:
        """Cancel tasks without a living parent until none is left, or the time is over: the Lease may be lost."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        cancelled_at: dict[Task, float] = {}
        while (pending := self.pending) and clock() < deadline:
            for task in filter(self._is_orphan, pending):
                # Repeatedly: asyncio.wait_for of Python 3.11 may lose a cancellation.
                if clock() >= cancelled_at.get(task, float("-inf")) + _RECANCEL_INTERVAL_SECONDS:
                    cancelled_at[task] = clock()
                    task.cancel()
            await asyncio.wait(pending, timeout=_RECANCEL_INTERVAL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if pending := self.pending:
            log.error("these tasks did not end in %.0f s: %s", seconds, ", ".join(t.get_name() for t in pending))

    def track(self, task: Task, parent: Task | None) -> None:
        self._parents[task] = parent if parent in self._parents else None
        task.add_done_callback(self._parents.pop)

    def _is_orphan(self, task: Task) -> bool:
        parent = self._parents[task]
        return parent is None or parent.done()


class _TrackingTaskFactory:
    """A task factory that registers each new task with the tree of its context."""

    def __init__(self, factory: Any) -> None:
        self._factory = factory or (lambda loop, work, **options: asyncio.Task(work, loop=loop, **options))

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        task = self._factory(loop, work, **options)
        context = options.get("context")
        if tree := context.get(_TREE) if context else _TREE.get():
            tree.track(task, asyncio.current_task(loop))
        return task


async def run_uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` in a task that is not cancelled with the caller."""
    task = asyncio.create_task(work)
    await wait_for_all([task])
    task.result()


async def wait_for_all(tasks: Collection[Task]) -> None:
    """Wait until all have ended, even if cancelled meanwhile: a second SIGTERM must not leave half of them behind."""
    is_cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            is_cancelled = True
    for task in tasks:
        _ = task.cancelled() or task.exception()  # otherwise asyncio logs that it was never retrieved
    if is_cancelled:
        raise asyncio.CancelledError
