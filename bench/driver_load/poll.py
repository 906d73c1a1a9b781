"""A process that polls URLs every 20 ms until its stdin ends, and prints one line of JSON: [[url, due, seconds], ...].

A request is due at a fixed time, and its latency counts from then: one that is late because the one before was slow has
waited, too. Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiohttp

PERIOD_SECONDS = 0.02


async def poll(session: aiohttp.ClientSession, url: str, key: str, found: list[tuple[str, float, float]]) -> None:
    due = time.monotonic()
    while True:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        async with session.get(url, headers={"Authorization": f"Bearer {key}"}) as response:
            await response.read()
            assert response.status == 200, f"{url}: {response.status}"
        found.append((url, due, time.monotonic() - due))
        due += PERIOD_SECONDS


async def main(*targets: str) -> None:
    found: list[tuple[str, float, float]] = []
    async with aiohttp.ClientSession() as session:
        tasks = [asyncio.create_task(poll(session, *target.split("|"), found)) for target in targets]
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
