"""Programs of bench/agents.py, in one process: `python programs.py AT_ONCE EPISODES_PER_SECOND`, episodes on stdin.

Each plays an episode: 4 turns with the whole history, and its tools between them. It imports little, to start soon.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

import aiohttp

NUM_TURNS = 4
LOW_SECONDS, HIGH_SECONDS = 0.1 / 10, 4 / 10
"""Durations of the tools between two turns."""
RESULT = "The tool returned 42, and then some more text that the policy reads before it answers."


async def play_all(num_at_once: int, episodes_per_second: float) -> None:
    """Play the episodes that stdin lists, at most so many at a time. A positive rate: they begin at random times."""
    episodes, draw = [json.loads(line) for line in sys.stdin], random.Random(0)
    free = asyncio.Semaphore(num_at_once)
    delays = [0.0]
    for _ in episodes[1:]:
        delays.append(delays[-1] + (draw.expovariate(episodes_per_second) if episodes_per_second else 0.0))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=NO_TIMEOUT) as session:

        async def play(url: str, key: str, delay: float) -> None:
            await asyncio.sleep(delay)
            async with free:
                await play_one(session, url, key)

        await asyncio.gather(*(play(*each, delay) for each, delay in zip(episodes, delays, strict=True)))


NO_TIMEOUT = aiohttp.ClientTimeout(total=None)


async def play_one(session: aiohttp.ClientSession, url: str, key: str) -> None:
    draw, headers = random.Random(key), {"Authorization": f"Bearer {key}"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{draw.randint(0, 99)} + {draw.randint(0, 99)}?"}]
    for turn in range(NUM_TURNS):
        if turn:
            await asyncio.sleep(draw.uniform(LOW_SECONDS, HIGH_SECONDS))
        body = {"model": "policy", "messages": messages}
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
        if response.status != 200:
            sys.exit(f"the gateway refused a turn: {answer}")
        messages += [answer["choices"][0]["message"], {"role": "user", "content": RESULT}]


if __name__ == "__main__":
    asyncio.run(play_all(int(sys.argv[1]), float(sys.argv[2])))
