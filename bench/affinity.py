"""`make bench-affinity`: how much of its prompts a fleet of rollouts reads from prefix caches, by how it is chosen.

    measured    two real vLLM replicas: episodes of several turns, all at once, in steps; new weights after each step.
                Answers are random tokens of a tiny model. Affinity, fewest requests and turn about, alternating.
    simulated   the same load in the simulation, with the engines' cache: the engines' own hits over its hits
    fleets      the simulation alone: 4 to 64 replicas, with caches that are full and weights that change meanwhile

The longest queue is its mean over time, over that of all queues. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from affinity_load.simulation import POLICIES, Load, Policy, Simulation
from agents_load.engines import Weights, run_engines
from rich.console import Console
from rich.table import Table

from rljob_api.manifest.roles import RolloutRole, Sampling
from rljob_api.wire import contract
from rljob_trainer.concurrency import end_tasks
from rljob_trainer.replicas.fleet import Affinity, Fleet
from rljob_trainer.replicas.http import auth_headers, open_session
from rljob_trainer.replicas.rollout_client import RolloutClient

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".models/tiny-qwen3"
REPLICAS = ["127.10.254.3", "127.10.254.5"]
LOAD = Load(answer_tokens=16, observation_tokens=100, answer_spread=0.0, pause_seconds=(0.02, 0.3))
FLEETS = {
    "unlimited": Load(),
    "full caches": Load(cache_tokens=120_000),
    "weights change": Load(update_seconds=20),
}
"""By what limits the caches. A replica has 64 episodes of up to 5,000 tokens."""
GROUPS_PER_REPLICA = 8
START_SECONDS = 600
POLL_SECONDS = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="of each policy in a round")
    parser.add_argument("--batch", type=int, default=64, help="requests that an engine runs at once")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--only", choices=["fleets", "engines"], help="the simulation without vLLM, or vLLM's part")
    arguments = parser.parse_args()
    os.environ[contract.ENV_TOKEN] = "bench"
    result: dict[str, Any] = {} if arguments.only == "engines" else {"fleets": _simulate_fleets()}
    if arguments.only != "fleets":
        # The tiny model's rotations work at any position.
        length = ("--hf-overrides", json.dumps({"max_position_embeddings": 4096}))
        with run_engines(arguments.model, REPLICAS, "--max-num-seqs", str(arguments.batch), *length) as weights:
            result |= asyncio.run(_measure(arguments, weights))
    print(json.dumps(result))


def _simulate_fleets() -> dict[str, Any]:
    found: dict[str, Any] = {}
    table = Table("replicas", "caches", "choice", "computed", "hit", "spilled", "longest queue / mean")
    for replicas, (name, load), policy in itertools.product((4, 16, 64), FLEETS.items(), POLICIES):
        counts = Simulation(replace(load, replicas=replicas, groups=GROUPS_PER_REPLICA * replicas), policy).run()
        found[f"{replicas}, {name}, {policy}"] = row = counts.summarize()
        shares = [f"{row[key]:.1%}" if key in row else "" for key in ("computed_share", "hit", "spilled")]
        table.add_row(str(replicas), name, policy, *shares, f"{row['longest_over_mean']:.2f}")
    Console(stderr=True, width=110).print(table)
    return _rounded(found)


async def _measure(arguments: argparse.Namespace, weights: Weights) -> dict[str, Any]:
    rounds: dict[Policy, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    async with open_session() as session:
        client = RolloutClient(RolloutRole(), session)
        await client.start()
        try:
            async with asyncio.timeout(START_SECONDS):
                await _update(client, weights)
            cache_tokens, block = await _read_cache(session)
            for number in range(arguments.rounds):
                for policy in POLICIES[number % 3 :] + POLICIES[: number % 3]:
                    rounds[policy].append(await _play(arguments, client, session, weights, policy))
        finally:
            await client.close()
    load = replace(LOAD, cache_tokens=cache_tokens, block=block)
    simulated = {policy: Simulation(load, policy).run().summarize() for policy in POLICIES}
    table = Table("choice", "tokens from caches", "of the simulation's", "hit", "spilled", "longest queue / mean", "s")
    medians = {policy: _medians(found) for policy, found in rounds.items()}
    for policy, row in medians.items():
        row["of_simulation"] = row["hit_share_of_tokens"] / simulated[policy]["hit_share_of_tokens"]
        shares = [row["hit_share_of_tokens"], row["of_simulation"], row.get("hit"), row.get("spilled")]
        texts = ["" if share is None else f"{share:.1%}" for share in shares]
        table.add_row(policy, *texts, f"{row['longest_over_mean']:.2f}", f"{row['seconds']:.1f}")
    Console(stderr=True, width=110).print(table)
    return _rounded({"measured": medians, "rounds": rounds, "simulated": simulated, "cache_tokens": cache_tokens})


async def _play(
    arguments: argparse.Namespace,
    client: RolloutClient,
    session: aiohttp.ClientSession,
    weights: Weights,
    policy: Policy,
) -> dict[str, float]:
    """Play the steps of one policy. Each has prompts of its own, and begins with new weights."""
    fleet, longest, mean = client.replicas.fleet, 0.0, 0.0
    queries, hits, picked = 0.0, 0.0, fleet.num_picked.copy()
    seconds = 0.0

    async def watch() -> None:
        nonlocal longest, mean
        while True:
            queues = [replica.in_flight for replica in fleet.replicas.values()]
            longest, mean = longest + max(queues), mean + statistics.mean(queues)
            await asyncio.sleep(POLL_SECONDS)

    for _ in range(arguments.steps):
        await _update(client, weights)
        before, draw, loop = await _read_hits(session), random.Random(0), asyncio.get_running_loop()
        prompts = [[draw.randrange(1000, 2000) for _ in range(LOAD.prompt_tokens)] for _ in range(LOAD.groups)]
        watching, since = asyncio.create_task(watch()), loop.time()
        with _chosen(fleet, policy):
            async with asyncio.TaskGroup() as tasks:
                for prompt in prompts:
                    prefix = Affinity()
                    for _ in range(LOAD.group_size):
                        affinity = Affinity(prefix) if policy == "affinity" else None
                        tasks.create_task(_play_episode(client, prompt, affinity, draw.randrange(2**31)))
        seconds += loop.time() - since
        await end_tasks(watching)
        after = await _read_hits(session)
        queries, hits = queries + after[0] - before[0], hits + after[1] - before[1]
    turns = fleet.num_picked - picked
    shares = {name: turns[name] / turns.total() for name in ("hit", "spilled", "new") if turns}
    row = {"hit_share_of_tokens": hits / queries, **shares, "longest_over_mean": longest / mean}
    return row | {"seconds": seconds / arguments.steps}


async def _update(client: RolloutClient, weights: Weights) -> None:
    """Return once all replicas have the same new weights."""
    await client.sync(weights.publish())
    while True:
        if len(client.served) == len(REPLICAS):
            return
        await asyncio.sleep(POLL_SECONDS)


async def _play_episode(client: RolloutClient, prompt: list[int], affinity: Affinity | None, seed: int) -> None:
    draw, tokens = random.Random(seed), list(prompt)
    sampling = Sampling(max_tokens=LOAD.answer_tokens)
    for _ in range(LOAD.turns):
        completion = await client.complete(tokens, sampling, draw.randrange(2**31), affinity)
        tokens += completion.token_ids
        tokens += [draw.randrange(1000, 2000) for _ in range(LOAD.observation_tokens)]
        await asyncio.sleep(draw.uniform(*LOAD.pause_seconds))


@contextmanager
def _chosen(fleet: Fleet, policy: Policy) -> Iterator[None]:
    """Let the fleet choose turn about, which the product cannot."""
    if policy != "round robin":
        yield
        return
    rounds = itertools.cycle(sorted(fleet.replicas))

    def pick(*_: Any, **__: Any) -> str:
        address = next(rounds)
        fleet.replicas[address].in_flight += 1
        return address

    fleet.pick = pick  # type: ignore[method-assign]
    try:
        yield
    finally:
        del fleet.pick


async def _read_hits(session: aiohttp.ClientSession) -> tuple[float, float]:
    """Return the tokens of prompts that the engines looked up in their caches, and those that they found."""
    texts = [await _read_metrics(session, address) for address in REPLICAS]
    looked_up, found = (
        sum(
            float(re.findall(rf"^vllm:prefix_cache_{name}_total\{{.*\}} (\S+)", text, re.MULTILINE)[0])
            for text in texts
        )
        for name in ("queries", "hits")
    )
    return looked_up, found


async def _read_cache(session: aiohttp.ClientSession) -> tuple[int, int]:
    """Return the tokens of an engine's cache, and those of a block."""
    text = await _read_metrics(session, REPLICAS[0])
    found = re.search(r"^vllm:cache_config_info\{(.*)\}", text, re.MULTILINE)
    assert found, text
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1]))
    block = int(labels["block_size"])
    return int(labels["num_gpu_blocks"]) * block, block


async def _read_metrics(session: aiohttp.ClientSession, address: str) -> str:
    url = f"http://{address}:{contract.PORT_ROLLOUT}/metrics"
    async with session.get(url, headers=auth_headers()) as response:
        return await response.text()


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def _rounded(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_rounded(value) for value in found]
    return round(found, 4) if isinstance(found, float) else found


if __name__ == "__main__":
    main()
