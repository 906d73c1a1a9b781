"""What the tasks of the event loop wait for, as text for the log."""

from __future__ import annotations

import asyncio
import io

_NUM_TASKS = 50
_NUM_FRAMES = 8


def describe_tasks() -> str:
    """Return the stacks of the running loop's tasks, each stack once, with the number of its tasks."""
    seen: dict[str, int] = {}
    for task in asyncio.all_tasks():
        text = io.StringIO()
        task.print_stack(limit=_NUM_FRAMES, file=text)
        stack = text.getvalue().partition("\n")[2]  # the first line has the task's name
        seen[stack] = seen.get(stack, 0) + 1
    return "\n".join(f"{count} x\n{stack}" for stack, count in list(seen.items())[:_NUM_TASKS])
