"""Serves a page until Ctrl-C."""

import asyncio
import contextlib
import signal
import webbrowser
from collections.abc import Callable, Mapping

from rljob_cli.output import say
from rljob_cli.ui.runs import WatchedRun
from rljob_cli.ui.server import UiServer


async def serve(read_runs: Callable[[], Mapping[str, WatchedRun]], port: int, should_open: bool) -> int:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
    server = UiServer(read_runs)
    url = await server.start(port)
    try:
        print(f"{url}\nonly this machine can open it, with this address; Ctrl-C ends it", flush=True)
        if should_open and not await asyncio.to_thread(webbrowser.open, url):
            say(f"no browser was found; open {url}")
        await ended.wait()
    finally:
        await server.close()
    return 0
