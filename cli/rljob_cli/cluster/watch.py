"""A view that is drawn repeatedly. On a terminal it takes the whole screen, and keys scroll it.

Invariant: every line of a view can be reached, and the terminal is as before at the end, also after Ctrl-C and SIGTERM,
and while Ctrl-Z has stopped the program.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import SegmentLines
from rich.text import Text

from rljob_api.errors import RLJobError
from rljob_cli.tables import CleanConsole, to_text

_KEY = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_MOVES = {
    **dict.fromkeys(("j", "\r", "\n", "\x1b[B", "\x1bOB"), "down"),
    **dict.fromkeys(("k", "\x1b[A", "\x1bOA"), "up"),
    **dict.fromkeys((" ", "f", "\x1b[6~"), "page down"),
    **dict.fromkeys(("b", "\x1b[5~"), "page up"),
    **dict.fromkeys(("g", "\x1b[H", "\x1bOH", "\x1b[1~"), "start"),
    **dict.fromkeys(("G", "\x1b[F", "\x1bOF", "\x1b[4~"), "end"),
}
"""The keys of less, and what terminals send for arrows, Page Up and Down, Home and End."""
Draw = Callable[[], Awaitable[RenderableType]]


@dataclass
class Pager:
    """A window on a view. The lines below it say what is not shown, and whether the view is out of date."""

    view: RenderableType
    problem: str = ""
    top: int = 0
    """Index of the first line shown."""
    is_over: bool = False
    _page: int = 1
    """Lines that the terminal shows at once, as last drawn."""
    _num_lines: int = 0

    def press(self, key: str) -> None:
        steps = {"down": 1, "up": -1, "page down": self._page, "page up": -self._page}
        if key == "q":
            self.is_over = True
        elif (move := _MOVES.get(key)) in steps:
            self.top += steps[move]
        elif move is not None:
            self.top = 0 if move == "start" else self._num_lines
        self._stay_inside()

    def _stay_inside(self) -> None:
        self.top = max(0, min(self.top, self._num_lines - self._page))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.view, options.update(height=None), pad=False)
        footer = [Text(self.problem, "red", no_wrap=True, overflow="ellipsis")] if self.problem else []
        self._num_lines, self._page = len(lines), max(1, console.height - 1 - len(footer))
        self._stay_inside()
        end = min(self.top + self._page, self._num_lines)
        shown = f"lines {self.top + 1} to {end} of {self._num_lines}: arrows, Page Up and Down scroll; " * (
            self._num_lines > self._page
        )
        yield SegmentLines(lines[self.top : end], new_lines=True)
        yield Group(*footer, Text(f"{shown}q ends", "dim", no_wrap=True, overflow="ellipsis"))


async def watch(draw: Draw, interval_seconds: float) -> None:
    """Draw repeatedly until q or an interrupt. A failed refresh keeps the last view."""
    pager, console = Pager(await draw()), CleanConsole(sys.stdout)  # the first failure ends the command
    if console.is_terminal and sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # Windows has no termios
            return await _show_on_screen(pager, draw, console, interval_seconds)
    while True:
        view = Group(pager.view, "", Text(pager.problem)) if pager.problem else pager.view
        if console.is_terminal:
            console.print(view, "")
        else:
            print(f"{to_text(view)}\n", flush=True)
        await _refresh(pager, draw, interval_seconds)


async def _refresh(pager: Pager, draw: Draw, interval_seconds: float) -> None:
    await asyncio.sleep(interval_seconds)
    try:
        pager.view, pager.problem = await draw(), ""
    except RLJobError as error:
        pager.problem = f"not up to date: {error}"


async def _show_on_screen(pager: Pager, draw: Draw, console: Console, interval_seconds: float) -> None:
    changed = asyncio.Event()

    async def refresh() -> None:
        while True:
            await _refresh(pager, draw, interval_seconds)
            changed.set()

    def press(key: str) -> None:
        pager.press(key)
        changed.set()

    live = Live(pager, console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with _read_keys(press) as keyboard, _handle_signals(keyboard, live), live:
        async with asyncio.TaskGroup() as tasks:
            refreshing = tasks.create_task(refresh())
            while not pager.is_over:
                live.update(pager, refresh=True)
                await changed.wait()
                changed.clear()
            refreshing.cancel()


@dataclass
class _Keyboard:
    """The terminal's settings, in which keys are read without waiting for the end of a line."""

    file: int

    def __post_init__(self) -> None:
        import termios

        self._before = termios.tcgetattr(self.file)

    def start(self) -> None:
        import tty

        tty.setcbreak(self.file)

    def stop(self) -> None:
        import termios

        termios.tcsetattr(self.file, termios.TCSADRAIN, self._before)


@contextlib.contextmanager
def _read_keys(press: Callable[[str], None]) -> Iterator[_Keyboard]:
    """Call `press` for each key. Ctrl-C stays an interrupt."""
    keyboard, loop = _Keyboard(sys.stdin.fileno()), asyncio.get_running_loop()

    def read() -> None:
        for key in _KEY.findall(os.read(keyboard.file, 1024).decode(errors="replace")):
            press(key)

    keyboard.start()
    loop.add_reader(keyboard.file, read)
    try:
        yield keyboard
    finally:
        loop.remove_reader(keyboard.file)
        keyboard.stop()


@contextlib.contextmanager
def _handle_signals(keyboard: _Keyboard, live: Live) -> Iterator[None]:
    """Give the terminal back while the program is stopped, and end by SIGTERM as by Ctrl-C."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        live.stop()
        keyboard.stop()
        os.kill(os.getpid(), signal.SIGSTOP)  # returns once the program continues
        keyboard.start()
        live.vertical_overflow = "crop"  # Live.stop has changed it
        live.start(refresh=True)

    loop.add_signal_handler(signal.SIGTSTP, stop)
    before = signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        loop.remove_signal_handler(signal.SIGTSTP)
