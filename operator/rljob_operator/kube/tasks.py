"""Ends tasks so that all of them end: ours, also when we are cancelled meanwhile, and a library's, however deep.

A TaskTree knows who began whom. Invariant: only a task whose parent has ended is cancelled by it. Who is alive ends its
own children, in its own order: kopf's watches take a cancellation of themselves and their children at once for a pause.
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
_TREE: contextvars.ContextVar[TaskTree | None] = contextvars.ContextVar("tree of tasks", default=None)
_CANCEL_AGAIN_SECONDS = 1.0
END_SECONDS = 15.0


class TaskTree:
    """The tasks begun by `create_task`, by those, and so on."""

    def __init__(self) -> None:
        self._parents: dict[Task, Task | None] = {}

    def create_task(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """The root."""
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        if not isinstance(factory := loop.get_task_factory(), _NotingFactory):
            loop.set_task_factory(_NotingFactory(factory))
        context.run(_TREE.set, self)
        return loop.create_task(work, context=context)

    @property
    def pending(self) -> set[Task]:
        return {task for task in self._parents if not task.done()}

    async def end(self, seconds: float = END_SECONDS) -> None:
        """Cancel what has no parent any more until nothing is left. Does not wait for ever: the lead may be lost."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        cancelled_at: dict[Task, float] = {}
        while (pending := self.pending) and clock() < deadline:
            for task in filter(self._is_orphan, pending):
                # Again when it took the first for something else, as asyncio.wait_for of Python 3.11 may.
                if clock() >= cancelled_at.get(task, float("-inf")) + _CANCEL_AGAIN_SECONDS:
                    cancelled_at[task] = clock()
                    task.cancel()
            await asyncio.wait(pending, timeout=_CANCEL_AGAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if pending := self.pending:
            log.error("these tasks did not end in %.0f s: %s", seconds, ", ".join(t.get_name() for t in pending))

    def note(self, task: Task, parent: Task | None) -> None:
        self._parents[task] = parent if parent in self._parents else None
        task.add_done_callback(self._parents.pop)

    def _is_orphan(self, task: Task) -> bool:
        parent = self._parents[task]
        return parent is None or parent.done()


class _NotingFactory:
    """A loop's task factory that tells a task's tree of it."""

    def __init__(self, factory: Any) -> None:
        self._factory = factory or (lambda loop, work, **options: asyncio.Task(work, loop=loop, **options))

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        task = self._factory(loop, work, **options)
        context = options.get("context")
        if tree := context.get(_TREE) if context else _TREE.get():
            tree.note(task, asyncio.current_task(loop))
        return task


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, which is not cancelled with us."""
    task = asyncio.create_task(work)
    await finish([task])
    task.result()


async def finish(tasks: Collection[Task]) -> None:
    """Wait until all have ended, also when cancelled meanwhile: a second SIGTERM must not leave half of them behind."""
    is_cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            is_cancelled = True
    for task in tasks:
        _ = task.cancelled() or task.exception()  # or the loop complains that nobody has asked
    if is_cancelled:
        raise asyncio.CancelledError
