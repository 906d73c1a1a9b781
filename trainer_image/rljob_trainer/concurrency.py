"""Coroutines that run together and fail together, or under a watcher, and work that must end before anything else
happens.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


async def run_all(work: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run all of `work` concurrently, and return the results. The first error cancels the rest; it is not wrapped."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def end_tasks(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel the tasks, and wait until they have ended. What they raise is dropped; one that is None has not begun."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)


async def run_in_thread(
    work: Callable[_Parameters, _Result], /, *arguments: _Parameters.args, **named: _Parameters.kwargs
) -> _Result:
    """Run `work` in a thread. A cancellation is raised once it has ended: nothing writes the same files meanwhile."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *arguments, **named))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


async def run_with_watcher(work: Coroutine[Any, Any, _Result], watcher: Coroutine[Any, Any, None]) -> _Result:
    """Run `work` until it ends or `watcher` raises; both then end. The watcher's error wins: it names the cause. A
    watcher that returns has nothing to report."""
    working, watching = asyncio.create_task(work), asyncio.create_task(watcher)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if watching.done() and not (working.done() and working.exception() is None):
            watching.result()
        return await working
    finally:
        await end_tasks(working, watching)


async def wait_for_event(event: asyncio.Event, working: asyncio.Future[Any]) -> None:
    """Wait until `event` is set, or `working` has ended, which goes on."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def wait_forever() -> NoReturn:
    """Stands for a watcher of what cannot fail."""
    while True:
        await asyncio.Event().wait()
