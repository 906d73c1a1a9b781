"""`make bench-agents`: what the model gateway costs, in front of a real vLLM, without a trainer.

Programs play episodes of 4 turns; between two turns each waits for its tools, U(0.1, 4) s / 10. Four processes: the
rollout (vLLM), its weights, the programs (aiohttp, the whole history in each request), and this one, which has what the
driver has: the gateway, the rollout client, and the transcripts.

    alone       the gateway with an engine that answers after 0.3 s and costs nothing, with arrivals at random times, at
                fractions of the turns per second that it reaches when it is saturated
    below       a real engine whose batch is not full: few episodes at a time
    full        all episodes at once: the engine is saturated
    direct      the prompts of `full` again, straight to the engine: each worker sends its next one at once

The overhead of a turn is what the gateway adds: from the request's headers to the engine, and from the engine's answer
to the last byte of the response. The batch is full when the engine runs as many requests as it can. Each turn is
checked: 4 per episode, in one segment. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import resource
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from agents_load.engines import run_engines
from agents_load.programs import NUM_TURNS
from rich.console import Console
from rich.table import Table

from rljob_api.manifest.agent import Agent
from rljob_api.manifest.roles import RolloutRole, Sampling
from rljob_api.wire import contract
from rljob_api.wire.weights import WeightManifest
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask, Generate, OpenEpisode
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.episodes.types import Completion
from rljob_trainer.gateway.server import ModelGateway, TurnTimes
from rljob_trainer.replicas.http import auth_headers, open_session
from rljob_trainer.replicas.rollout_client import RolloutClient

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "bench/agents_load/programs.py"
MODEL = ROOT / ".models/tiny-qwen3"
ROLLOUT, GATEWAY = "127.10.254.3", "127.10.254.4"
ENGINE_SECONDS = 0.3
"""Duration of an answer of the engine that costs nothing."""
NUM_BELOW = 8
"""Episodes at a time, far fewer than the batch."""
LOADS = (0.25, 0.5, 0.75)
START_SECONDS = 300
POLL_SECONDS = 0.25


@dataclass
class Measured:
    """One phase, from its first answer on."""

    started_at: float = 0.0
    started_cpu: float = 0.0
    seconds: float = 0.0
    num_tokens: int = 0
    turns: list[TurnTimes] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    """Requests that the engine runs, at each poll."""
    rss_mib: float = 0.0
    """Resident memory of this process, at most."""
    cpu_seconds: float = 0.0
    """CPU time of this process."""

    def start(self) -> None:
        self.started_at, self.started_cpu = time.monotonic(), time.process_time()

    def record_turn(self, times: TurnTimes) -> None:
        if not self.turns:
            self.start()  # the programs have started, too
        self.turns.append(times)

    def record_end(self) -> None:
        self.seconds = time.monotonic() - self.started_at
        self.cpu_seconds = time.process_time() - self.started_cpu

    def summarize(self, batch: int | None = None) -> dict[str, float]:
        values = {"seconds": self.seconds, "tokens_per_second": self.num_tokens / self.seconds, "rss_mib": self.rss_mib}
        if self.turns:
            overheads = sorted(each.to_engine + each.to_client for each in self.turns)
            values["turns_per_second"] = len(overheads) / self.seconds
            values["cpu_ms_per_turn"] = self.cpu_seconds * 1e3 / len(overheads)
            values["p50_ms"] = statistics.median(overheads) * 1e3
            values["p99_ms"] = overheads[int(0.99 * (len(overheads) - 1))] * 1e3
        if batch and self.running:
            values["full_share"] = statistics.mean(number >= batch for number in self.running)
        return {name: round(value, 3) for name, value in values.items()}


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64, help="requests that the engine runs at once")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--only-gateway", action="store_true", help="the phase `alone` only: no vLLM")
    arguments = parser.parse_args()
    os.environ[contract.ENV_TOKEN] = "bench"
    print(json.dumps(asyncio.run(_measure(arguments))))


# The phases


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"episodes": arguments.episodes, "batch": arguments.batch}
    result["alone"] = await _measure_alone(arguments)
    if not arguments.only_gateway:
        with run_engines(arguments.model, [ROLLOUT], "--max-num-seqs", str(arguments.batch)) as weights:
            result |= await _measure_with_engine(arguments, weights.publish())
    _show(result)
    return result


async def _measure_alone(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the gateway does with an engine that costs nothing."""
    template = _load_template(arguments.model)
    text = template.encode("The answer is 42, because the tool returned it.")[: arguments.max_tokens]
    completion = Completion(text, [-0.5] * len(text), [0] * len(text), template.decode(text), False, "bench")

    async def generate(token_ids: list[int], max_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
        await asyncio.sleep(ENGINE_SECONDS)
        return completion

    full = await _play_phase(arguments, lambda _: generate, arguments.episodes)
    rows = {"saturated": full.summarize()}
    best = rows["saturated"]["turns_per_second"]
    for load in LOADS:
        rate = load * best / NUM_TURNS
        phase = await _play_phase(arguments, lambda _: generate, 1_000_000, rate, num_episodes=_shorten(arguments))
        rows[f"{load:.0%}"] = phase.summarize()
    return rows


def _shorten(arguments: argparse.Namespace) -> int:
    """Return the episodes of a phase that is not saturated: its turns take their time."""
    return min(arguments.episodes, max(64, arguments.episodes // 8))


async def _measure_with_engine(arguments: argparse.Namespace, manifest: WeightManifest) -> dict[str, Any]:
    sampling = Sampling(max_tokens=arguments.max_tokens)
    prompts: dict[str, list[list[int]]] = {}
    async with open_session() as session:
        rollouts = RolloutClient(RolloutRole(), session)
        await rollouts.start()
        try:
            async with asyncio.timeout(START_SECONDS):
                await rollouts.sync(manifest)

            def bind(name: str) -> Generate:
                prompts[name], draw = [], random.Random(name)

                async def generate(
                    token_ids: list[int], max_tokens: int | None = None, stop: Sequence[str] = ()
                ) -> Completion:
                    prompts[name].append(list(token_ids))
                    return await rollouts.complete(token_ids, sampling, draw.getrandbits(31))

                return generate

            below = await _play_phase(arguments, bind, NUM_BELOW, num_episodes=_shorten(arguments))
            prompts.clear()
            full = await _play_phase(arguments, bind, arguments.episodes, session=session)
            direct = Measured()

            async def send(name: str) -> None:
                draw = random.Random(name)
                for prompt in prompts[name]:
                    completion = await rollouts.complete(prompt, sampling, draw.getrandbits(31))
                    direct.num_tokens += len(completion.token_ids)

            direct.start()
            async with _watch(direct, session):
                await asyncio.gather(*map(send, prompts))
        finally:
            await rollouts.close()
    phases = {"below": below, "full": full, "direct": direct}
    return {name: measured.summarize(arguments.batch) for name, measured in phases.items()}


async def _play_phase(
    arguments: argparse.Namespace,
    bind: Callable[[str], Generate],
    num_at_once: int,
    episodes_per_second: float = 0.0,
    *,
    num_episodes: int | None = None,
    session: aiohttp.ClientSession | None = None,
) -> Measured:
    """Let the programs play. `bind`: the engine of an episode. `session`: to poll a real engine."""
    measured = Measured()
    agent = Agent.model_validate({"type": "program", "runner": {"command": ["true"]}})
    gateway = ModelGateway(agent, _load_template(arguments.model), None, on_turn=measured.record_turn)
    await gateway.start(GATEWAY, 0)
    episodes: list[OpenEpisode] = []
    try:
        lines = []
        for number in range(num_episodes or arguments.episodes):
            name = f"bench/train/1/{number}/0"
            prompt = Prompt(number, [{"role": "user", "content": "?"}], [1], None, "", {})
            episodes.append(gateway.open(EpisodeTask(name, "train", prompt, number, 0, bind(name))))
            _, access = episodes[-1].start_attempt()
            lines.append(json.dumps([access.url, access.api_key]))
        command = [sys.executable, str(PROGRAMS), str(num_at_once), str(episodes_per_second)]
        programs = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        async with _watch(measured, session):
            await programs.communicate("\n".join(lines).encode())
        if programs.returncode:
            sys.exit("the programs failed")
        for episode in episodes:
            recording = episode.read()
            assert (len(recording.turns), len(recording.segments)) == (NUM_TURNS, 1), recording.breaks
            measured.num_tokens += sum(int(segment.loss_mask.sum()) for segment in recording.segments)
    finally:
        for episode in episodes:
            episode.close()
        await gateway.close()
    return measured


@contextlib.asynccontextmanager
async def _watch(measured: Measured, session: aiohttp.ClientSession | None) -> AsyncIterator[None]:
    """Measure time and memory, and with a session what the engine runs."""
    task = asyncio.create_task(_poll(measured, session))
    try:
        yield
    finally:
        measured.record_end()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _poll(measured: Measured, session: aiohttp.ClientSession | None) -> None:
    process, url = psutil.Process(), f"http://{ROLLOUT}:{contract.PORT_ROLLOUT}/metrics"
    while True:
        measured.rss_mib = max(measured.rss_mib, process.memory_info().rss / 2**20)
        if session is not None and measured.started_at:
            async with session.get(url, headers=auth_headers()) as response:
                found = re.search(r"^vllm:num_requests_running\{.*\} (\S+)", await response.text(), re.MULTILINE)
            measured.running.append(float(found[1]) if found else 0.0)
        await asyncio.sleep(POLL_SECONDS)


def _load_template(model: Path) -> ChatTemplate:
    from transformers import AutoTokenizer

    return ChatTemplate(AutoTokenizer.from_pretrained(model))


def _show(result: dict[str, Any]) -> None:
    rows = {f"alone, {name}": row for name, row in result["alone"].items()}
    rows |= {name: result[name] for name in ("below", "full", "direct") if name in result}
    columns = ("turns_per_second", "tokens_per_second", "p50_ms", "p99_ms", "cpu_ms_per_turn", "full_share", "rss_mib")
    table = Table("phase", *columns, title=f"{result['episodes']} episodes of {NUM_TURNS} turns")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:,.2f}" if column in row else "" for column in columns))
    Console(stderr=True, width=160).print(table)


if __name__ == "__main__":
    main()
