"""How long the event loop was held, seen from within it and by a process that polls its servers.

Other programs of the machine take the processor as well. So a gap counts with the CPU time that this process spent in
it, if that is shorter: then the loop waited for the machine and not for the driver.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_POLL = Path(__file__).with_name("poll.py")
_TICK_SECONDS = 0.001


@dataclass
class Window:
    """A part of the run."""

    began: float
    began_cpu: float
    ended: float = 0.0
    closed: float = 0.0
    """When the loop had run again."""
    cpu_seconds: float = 0.0
    """CPU time of all threads."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Gap(NamedTuple):
    """A time for which the loop ran nothing else."""

    ended: float
    wall: float
    held: float
    """The part of it that this process worked."""


@dataclass
class Watch:
    windows: dict[str, Window] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    polled: list[tuple[str, float, float]] = field(default_factory=list)
    """As poll.py prints them; known at the end."""

    @asynccontextmanager
    async def window(self, name: str) -> AsyncIterator[None]:
        """Measure what happens within, and nothing of the gaps before and after it."""
        await asyncio.sleep(5 * _TICK_SECONDS)
        self.windows[name] = window = Window(time.monotonic(), time.process_time())
        yield
        window.ended, window.cpu_seconds = time.monotonic(), time.process_time() - window.began_cpu
        await asyncio.sleep(5 * _TICK_SECONDS)
        window.closed = time.monotonic()

    def longest(self, name: str) -> tuple[float, float]:
        """Return the longest time within a window for which this process held the loop, and the longest gap."""
        window = self.windows[name]
        inside = [gap for gap in self.gaps if window.began <= gap.ended <= window.closed]
        return max((gap.held for gap in inside), default=0.0), max((gap.wall for gap in inside), default=0.0)

    def latencies(self, name: str, url: str) -> list[float]:
        """Return the latencies of requests that were due within a window, ascending."""
        window = self.windows[name]
        return sorted(s for polled, due, s in self.polled if polled == url and window.began <= due <= window.ended)


@asynccontextmanager
async def watching(targets: dict[str, str]) -> AsyncIterator[Watch]:
    """Watch the running loop. `targets`: key by URL, which a process polls."""
    watch = Watch()
    arguments = [f"{url}|{key}" for url, key in targets.items()]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(_POLL), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**28,
    )
    ticks = asyncio.create_task(_tick(watch.gaps))
    try:
        yield watch
        output, _ = await process.communicate(b"")  # the end of its stdin
        watch.polled = [(url, due, seconds) for url, due, seconds in json.loads(output)]
    finally:
        ticks.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _tick(gaps: list[Gap]) -> None:
    before, before_cpu = time.monotonic(), time.process_time()
    while True:
        await asyncio.sleep(_TICK_SECONDS)
        now, cpu = time.monotonic(), time.process_time()
        wall = max(0.0, now - before - _TICK_SECONDS)
        gaps.append(Gap(now, wall, min(wall, cpu - before_cpu)))
        before, before_cpu = now, cpu
