"""`make bench-driver`: what the tokens of a step cost the driver's event loop, and a long history its checkpoints.

One process has what the driver has: its status server, its gateway, its updates and its ledger. Another one polls
/status and the gateway every 20 ms. All groups of the step are scored at once, which is the worst case:

    idle      nothing but the polls, for 2 s
    rows      scored groups to advantages and rows
    ship      rows to the parts of at most 64 ranks, copied as Ray's object store copies them
    free      the end of the rows
    records   the step's line in metrics.jsonl, the history, /metrics and /status
    log       the trajectory log of an eighth of the step, in its thread

Times are of the CPU where the machine has other work, too. `gap_ms` is the longest time for which the loop ran nothing
else, and `held_ms` without what other programs took. `rows_and_records_cpu_seconds` is of both alone, before the polls
begin. p99 is of requests that were due meanwhile, counted from when they were due. `completions` is one answer of the
engine, read event by event. `history` is a checkpoint without the ranks' part, and a start from it. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
from driver_load.completions import measure_completion
from driver_load.episodes import Shape, build_groups, build_job
from driver_load.history import measure_history
from driver_load.step import Books, build_rows, record, ship, write_log
from driver_load.watch import Watch, watching

from rljob_api.manifest.agent import Agent
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask, Generate
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.gateway.server import ModelGateway
from rljob_trainer.head.status_server import StatusServer

ADDRESS, TOKEN = f"127.10.{os.getpid() % 250}.1", "bench"
IDLE_SECONDS = 2.0
TARGET_SECONDS, TARGET_HELD_MS = 1.5, 50.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--steps", type=int, nargs="*", default=[10, 5000], help="of the histories")
    options = parser.parse_args()
    os.environ["RLJOB_TOKEN"] = TOKEN
    result = asyncio.run(measure(Shape(options.episodes, options.tokens, options.group_size), options.steps))
    print(json.dumps({"bench": "driver", **vars(options), **result}))


async def measure(shape: Shape, steps: list[int]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    result["completions"] = {str(n): rounded(measure_completion(n)) for n in (4000, 32_000)}
    report("completions", result["completions"])
    await measure_history(shape, 1)  # the first one also imports
    result["history"] = {str(n): rounded(await measure_history(shape, n)) for n in steps}
    report("history", result["history"])
    return result | await measure_step(shape)


async def measure_step(shape: Shape) -> dict[str, Any]:
    before = psutil.Process().memory_info().rss
    since = time.monotonic()
    groups = build_groups(shape)
    gc.collect()
    gc.freeze()  # as the head does
    held_bytes = (psutil.Process().memory_info().rss - before) / (shape.episodes * shape.tokens)
    report("episodes", f"{shape.episodes} in {time.monotonic() - since:.0f} s, {held_bytes:.0f} bytes a token")
    with tempfile.TemporaryDirectory() as folder:
        books = Books(build_job(shape), Path(folder))
        since_cpu = time.process_time()
        outcome, _ = await build_rows(books, groups)
        await record(books, outcome)
        alone = time.process_time() - since_cpu
        report("alone", f"{alone:.2f} s of CPU time")
        server = StatusServer(books.board, books.prometheus.render)
        template = cast(ChatTemplate, SimpleNamespace(arguments={}, has_variable=bool))  # no answer is asked for
        gateway = ModelGateway(Agent(), template, None)
        await server.start(ADDRESS)
        await gateway.start(ADDRESS, port=0)
        status, key, episode = f"http://{ADDRESS}:{server_port()}/status", *open_episode(gateway)
        models = f"{gateway.url}/v1/models"
        try:
            async with watching({status: TOKEN, models: key}) as watch:
                await asyncio.sleep(1)  # until it polls
                await run(books, groups, watch)
            episode.close()
        finally:
            await books.ledger.trajectories.close()
            await gateway.close()
            await server.close()
    found = summarize(watch, status, models, alone)
    return {"bytes_per_token": round(held_bytes, 1), "rows_and_records_cpu_seconds": round(alone, 3), **found}


async def run(books: Books, groups: list[Any], watch: Watch) -> None:
    async with watch.window("idle"):
        await asyncio.sleep(IDLE_SECONDS)
    async with watch.window("rows"):
        outcome, rows = await build_rows(books, groups)
    async with watch.window("ship"):
        num_bytes = await ship(books, rows)
    report("ship", f"{num_bytes / 2**20:.0f} MiB")
    async with watch.window("free"):
        del rows
    async with watch.window("records"):
        await record(books, outcome)
    async with watch.window("log"):
        await write_log(books, groups[: -(-len(groups) // 8)])


def summarize(watch: Watch, status: str, models: str, alone: float) -> dict[str, Any]:
    def percentile(name: str, url: str) -> float:
        found = watch.latencies(name, url) or [0.0]
        return found[min(len(found) - 1, int(0.99 * len(found)))] * 1e3

    parts = {
        name: {
            "seconds": round(window.seconds, 3),
            "cpu_seconds": round(window.cpu_seconds, 3),
            "held_ms": round(watch.longest(name)[0] * 1e3, 1),
            "gap_ms": round(watch.longest(name)[1] * 1e3, 1),
            "status_p99_ms": round(percentile(name, status), 1),
            "gateway_p99_ms": round(percentile(name, models), 1),
        }
        for name, window in watch.windows.items()
    }
    for name, values in parts.items():
        report(name, values)
    held = max(parts[name]["held_ms"] for name in ("rows", "records"))
    worst = {
        "held_ms": held,
        "held_ms_with_ship_and_log": max(values["held_ms"] for name, values in parts.items() if name != "idle"),
        "status_p99_over_idle": round(
            max(parts[name]["status_p99_ms"] for name in ("rows", "records")) / parts["idle"]["status_p99_ms"], 1
        ),
        "meets_target": alone < TARGET_SECONDS and held < TARGET_HELD_MS,
    }
    return {"parts": parts, **worst}


def open_episode(gateway: ModelGateway) -> tuple[str, Any]:
    """Return the key of an episode that a program plays, and the episode."""
    prompt = Prompt(0, [{"role": "user", "content": "q"}], [1])
    episode = gateway.open(EpisodeTask("0", "train", prompt, 0, 0, cast(Generate, None)))
    _, access = episode.start_attempt()
    return access.api_key, episode


def server_port() -> int:
    from rljob_api.wire.contract import PORT_DRIVER
    from rljob_api.wire.discovery import listening_port

    return listening_port(PORT_DRIVER)


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}


def report(what: str, values: object) -> None:
    print(f"{what}: {values}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
