"""A view that is drawn repeatedly, until Ctrl-C.

On a terminal each drawing takes the place of the one before. If it is higher than the terminal, the scrollback has it.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from rich.console import RenderableType

from rljob_api.errors import RLJobError
from rljob_cli.tables import CleanConsole, to_text


async def watch(draw: Callable[[], Awaitable[RenderableType]], interval_seconds: float) -> None:
    """A failed refresh keeps the last view; the first failure ends the command."""
    view, problem, console = await draw(), "", CleanConsole(sys.stdout)
    while True:
        if console.is_terminal:
            console.clear()
            console.print(view, problem)
        else:
            print(f"{to_text(view)}\n{problem}", flush=True)
        await asyncio.sleep(interval_seconds)
        try:
            view, problem = await draw(), ""
        except RLJobError as error:
            problem = f"not up to date: {error}"
