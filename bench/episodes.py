"""`make bench-episodes`: what an async episode costs in memory, and how many async rewards run at once.

Episodes: each takes an OpenAI client, gets one answer of a local endpoint, and waits for its second one. When all
wait, the proportional memory (PSS) of all worker processes is divided by the episodes: shared processes
(episodesPerProcess), and one process for each. Rewards: functions that import openai and await 3 s. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml
from aiohttp import web

HOST, MODEL_HOST, PORT, MODEL_PORT = "127.10.254.1", "127.10.254.2", 18080, 18090
TOKEN = "bench"
REWARD_SECONDS = 3
NUM_REWARDS, REWARD_SLOTS = 128, 64
NUM_ALONE = 16
"""Episodes with a process each: 1,024 need more memory than most machines have."""
PROGRAM = """
async def run(messages, client):
    for _ in range(2):
        await client.chat.completions.create(model="policy", messages=messages)
    return 1.0
"""
REWARD = f"""
import asyncio, openai

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep({REWARD_SECONDS})
    return 1.0
"""


class Model:
    """Answers the first request of each key at once, and the second one when `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.num_waiting = 0
        self._asked: set[str] = set()

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        key = request.headers["Authorization"]
        if key in self._asked:
            self.num_waiting += 1
            await self.release.wait()
        self._asked.add(key)
        message = {"role": "assistant", "content": "4"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1024, help="at once in shared processes (default: 1024)")
    parser.add_argument("--per-process", type=int, default=64, help="episodesPerProcess (default: 64)")
    parser.add_argument("--only-shared", action="store_true", help="without a process for each, which takes minutes")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(_measure(options.episodes, options.per_process, only_shared=options.only_shared))))


async def _measure(num_episodes: int, per_process: int, *, only_shared: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"episodes_per_process": per_process}
    found["episodes_shared"] = await _measure_episodes(num_episodes, per_process)
    print(f"shared: {found['episodes_shared']}", flush=True)
    found["rewards_shared_seconds"] = await _measure_rewards(per_process)
    print(f"rewards, shared: {found['rewards_shared_seconds']} s", flush=True)
    if not only_shared:
        found["episodes_alone"] = await _measure_episodes(NUM_ALONE, 1)
        print(f"alone: {found['episodes_alone']}", flush=True)
        found["rewards_alone_seconds"] = await _measure_rewards(1)
    return found


async def _measure_episodes(num: int, per_process: int) -> dict[str, Any]:
    function = {"inline": PROGRAM, "spareWorkers": 0, "maxMemory": "16Gi"}
    settings = {"function": function, "slots": num, "episodesPerProcess": per_process, "timeoutSeconds": 600}
    model = Model()
    async with _serve_model(model), _serve(settings, ["--serves", "episodes"]) as (server, session):
        started_at = time.monotonic()
        calls = [asyncio.create_task(_post(session, "/v1/call", _build_call(number))) for number in range(num)]
        while model.num_waiting < num:
            await asyncio.sleep(0.1)
            failed = [call.result() for call in calls if call.done()]
            assert not failed, failed[0]
        seconds = time.monotonic() - started_at
        workers = [each for each in server.children() if "rljob_service.worker" in each.cmdline()]
        total = sum(each.memory_full_info().pss for each in workers)
        model.release.set()
        results = await asyncio.gather(*calls)
    assert all(result["valid"] for result in results), next(result for result in results if not result["valid"])
    return {
        "episodes": num,
        "processes": len(workers),
        "mib_per_episode": round(total / num / 2**20, 2),
        "seconds_until_all_run": round(seconds, 1),
    }


async def _measure_rewards(per_process: int) -> float:
    """Return the seconds from the first request to the last result."""
    settings = {"function": {"inline": REWARD}, "slots": REWARD_SLOTS, "episodesPerProcess": per_process}
    async with _serve(settings, []) as (_, session):
        started_at = time.monotonic()
        samples = [
            {"id": f"s{number}", "prompt": "2+2?", "completion": "4", "ground_truth": "4"}
            for number in range(NUM_REWARDS)
        ]
        results = await asyncio.gather(*(_post(session, "/v1/score", sample) for sample in samples))
        seconds = time.monotonic() - started_at
    assert all(result["valid"] for result in results)
    return round(seconds, 2)


def _build_call(number: int) -> dict[str, Any]:
    arguments = {
        "episode": f"e{number}",
        "attempt": 0,
        "model": {"url": f"http://{MODEL_HOST}:{MODEL_PORT}", "api_key": f"sk-{number}"},
        "prompt": [{"role": "user", "content": "2+2?"}],
        "seed": 1,
        "max_turns": 4,
        "deadline_seconds": 600,
    }
    return {"id": f"e{number}", "arguments": arguments}


async def _post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(f"http://{HOST}:{PORT}{path}", json=body) as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found


@contextlib.asynccontextmanager
async def _serve_model(model: Model) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", model.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, MODEL_HOST, MODEL_PORT, backlog=4096).start()
    try:
        yield
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _serve(
    settings: dict[str, Any], arguments: Sequence[str]
) -> AsyncIterator[tuple[psutil.Process, aiohttp.ClientSession]]:
    with tempfile.TemporaryDirectory() as folder:
        process = _start(Path(folder, "service.yaml"), settings, arguments)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
                await _wait_ready(process, session)
                yield psutil.Process(process.pid), session
        finally:
            process.terminate()
            process.wait(60)


def _start(config: Path, settings: dict[str, Any], arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    config.write_text(yaml.safe_dump({"name": "bench", **settings}))
    command = [sys.executable, "-m", "rljob_service", "--config", str(config), "--host", HOST, "--port", str(PORT)]
    return subprocess.Popen([*command, *arguments], env={**os.environ, "RLJOB_TOKEN": TOKEN})


async def _wait_ready(process: subprocess.Popen[bytes], session: aiohttp.ClientSession) -> None:
    while process.poll() is None:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"http://{HOST}:{PORT}/rljob/ready") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.1)
    sys.exit(f"the server ended with exit code {process.returncode}")


if __name__ == "__main__":
    main()
