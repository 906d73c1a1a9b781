"""The trainer's reward clients against real reward servers that die, vanish from DNS or are slow for one group.

Checks what must always hold: each sample is scored, or invalid with a reason; the advantages depend only on the valid
samples; nothing waits forever. The agent loop is a fake: conversations end immediately.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from rljob_api.manifest.roles import Sampling
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.contract import PORT_SERVICE
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.algorithms.rows import build_rows, episode_rewards
from rljob_trainer.driver.collection import Collection, CollectionPlan, Collector
from rljob_trainer.episodes.types import Episode, Group, ScoredResult
from rljob_trainer.outages import OutageError, Outages
from rljob_trainer.replicas.http import open_session
from rljob_trainer.rewards.groups import RequestBuilder, RewardClients
from tests.support.algorithms import algorithm_spec
from tests.support.episodes import episode
from tests.support.waiting import DEADLINE_SECONDS

_GROUP_SIZE = 4
_PLAN = CollectionPlan("train", 1, _GROUP_SIZE, Sampling(), 0, "g")
_numbers = itertools.count(1)

SCORE = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(600 if extra_info["kind"] == "slow" and float(solution_str) % 2 else 0.01)
    return float(solution_str)
"""
RANK = """
import time

def reward(prompts, completions, kind, **columns):
    if kind[0] == "slow":
        time.sleep(600)
    return [float(sorted(completions).index(each)) for each in completions]
"""


class Agent:
    """Conversations without a model: the text is a number."""

    async def run(self, task: EpisodeTask) -> list[Episode]:
        await asyncio.sleep(0)
        text = str((task.group * 7 + task.sample * 3) % 10)
        return [episode(text=text, index=(task.prompt.index, task.group, task.sample))]


class Servers:
    """Real reward servers, each a process on its own loopback address, and the hosts file that lists them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.hosts = folder, folder / "hosts"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self, source: str, num: int = 1, **fields: Any) -> list[str]:
        """Start `num` more servers, list them, and return their addresses once they are ready."""
        addresses = [f"127.62.{201 + os.getpid() % 50}.{next(_numbers)}" for _ in range(num)]
        for address in addresses:
            self._launch(address, {"name": "r", "function": {"inline": source}, "slots": 3, **fields})
        async with aiohttp.ClientSession() as session:
            await until(lambda: self._are_ready(session, addresses))
        self.list_only(*self._processes)
        return addresses

    def _launch(self, address: str, reward: dict[str, Any]) -> None:
        folder = self._folder / address
        folder.mkdir()
        (folder / "service.yaml").write_text(yaml.safe_dump(reward))
        command = [sys.executable, "-m", "rljob_service", "--config", str(folder / "service.yaml"), "--grace", "1"]
        environment = {**os.environ, "RLJOB_TOKEN": "secret", "RLJOB_POD_IP": address}
        with (folder / "log").open("wb") as log:
            self._processes[address] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    async def _are_ready(self, session: aiohttp.ClientSession, addresses: list[str]) -> bool:
        for address in addresses:
            log = (self._folder / address / "log").read_text()
            assert self._processes[address].poll() is None, f"{address} has exited: {log}"
            try:
                async with session.get(f"http://{address}:{PORT_SERVICE}/rljob/ready") as response:
                    if response.status != 200:
                        return False
            except aiohttp.ClientError:
                return False
        return True

    def list_only(self, *addresses: str) -> None:
        """List only `addresses` in DNS."""
        if self.hosts.is_dir():
            self.hosts.rmdir()
        new = self.hosts.with_suffix(".new")
        new.write_text("".join(f"{address} rewards\n" for address in addresses))
        new.replace(self.hosts)

    def list_none(self) -> None:
        self.hosts.unlink()

    def break_dns(self) -> None:
        """Let each lookup raise an OSError."""
        self.hosts.unlink(missing_ok=True)
        self.hosts.mkdir()

    def kill(self, address: str) -> None:
        self._processes[address].send_signal(signal.SIGKILL)
        self._processes[address].wait(DEADLINE_SECONDS)

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait(DEADLINE_SECONDS)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.01)


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    running = Servers(tmp_path)
    monkeypatch.setenv("RLJOB_HOSTS_FILE", str(running.hosts))
    monkeypatch.setenv("RLJOB_TOKEN", "secret")
    monkeypatch.setenv("RLJOB_REWARD_SERVICES", json.dumps({"r": "rewards"}))
    yield running
    running.stop()


def make_reward(**fields: Any) -> Reward:
    return Reward.model_validate({"name": "r", "function": {"inline": "x"}, "slots": 3, **fields})


def make_prompts(num: int, slow: int | None = None) -> list[Prompt]:
    kinds = ["slow" if i == slow else "quick" for i in range(num)]
    return [Prompt(i, f"p{i}", [1], ground_truth="", extra_info={"kind": kind}) for i, kind in enumerate(kinds)]


@asynccontextmanager
async def collecting(
    spec: Reward, prompts: list[Prompt], outages: Outages | None = None
) -> AsyncIterator[tuple[Collection, RewardClients, Any]]:
    """Yield a running collection and its task."""
    async with open_session() as session, asyncio.timeout(DEADLINE_SECONDS):
        rewards = RewardClients([spec], session, outages=outages)
        await rewards.start()
        collector = Collector(Agent(), None, rewards, RequestBuilder(None))  # type: ignore[arg-type]

        collection = Collection(collector, prompts, replace(_PLAN, rewards=[spec]))

        async def collect() -> list[Group]:
            async with collection:
                groups = [group async for group in collection.groups()]
                await collection.rescore_stale(groups)
            return sorted(groups, key=lambda group: group.index)

        task = asyncio.create_task(collect())
        try:
            yield collection, rewards, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await rewards.close()


def check(groups: list[Group], spec: Reward, num_groups: int) -> list[Episode]:
    """Check what holds for every fault, and return the samples in order."""
    trajectories = [t for group in groups for t in group.episodes]
    assert len(groups) == num_groups
    for t in trajectories:
        result = t.results["r"]
        assert result.valid == (t.score is not None)
        assert result.valid or (result.reason and result.message), "invalid, with a reason and a message"
    job = algorithm_spec(groupSize=_GROUP_SIZE).model_copy(update={"rewards": [spec]})
    algorithm = build_algorithm(job)
    advantages = algorithm.advantages(episode_rewards(groups, algorithm.settings))
    rows = iter(row for of_group in build_rows(groups, advantages, algorithm.settings) for row in of_group)
    for group in groups:
        valid = [t.score for t in group.episodes if t.score is not None]
        mean = sum(valid) / len(valid) if valid else 0.0
        deviation = math.sqrt(sum((v - mean) ** 2 for v in valid) / (len(valid) - 1)) if len(valid) > 1 else 0.0
        for t in group.episodes:
            row = next(rows)
            assert row.loss_mask.any() == (t.score is not None), "an invalid sample is masked"
            expected = (t.score - mean) / deviation if t.score is not None and deviation else 0.0
            found = row.advantages[row.loss_mask].tolist()
            assert found == pytest.approx([expected] * len(found)), "from the valid samples only"
    return trajectories


def num_attempts(trajectory: Episode) -> int:
    result = trajectory.results["r"]
    assert isinstance(result, ScoredResult)
    return result.attempts


async def test_killed_replica_costs_no_sample_with_a_thousand_in_flight(servers: Servers) -> None:
    addresses = await servers.start(SCORE, 3)
    spec = make_reward(failurePolicy={"retries": 0})
    async with collecting(spec, make_prompts(275)) as (collection, rewards, task):
        client = rewards.clients["r"]
        await until(
            lambda: collection.progress.num_scored >= 60 and client.replicas.fleet.replicas[addresses[0]].in_flight
        )
        assert len(client.in_flight) >= 1000
        servers.kill(addresses[0])
        trajectories = check(await task, spec, 275)
        assert not client.in_flight
    assert all(t.score == float(t.text) for t in trajectories)
    assert any(num_attempts(t) > 1 for t in trajectories), "this test must hit requests"


async def test_temporary_dns_failure_costs_no_sample(servers: Servers) -> None:
    addresses = await servers.start(SCORE, 2)
    spec = make_reward(failurePolicy={"retries": 0})
    servers.list_none()
    async with collecting(spec, make_prompts(100)) as (collection, rewards, task):
        client = rewards.clients["r"]
        await until(lambda: client.replicas.num_waiting == 400)  # no address has been listed yet
        servers.list_only(*addresses)
        await until(lambda: collection.progress.num_scored >= 50)
        servers.break_dns()
        await until(lambda: collection.progress.num_scored >= 150)
        servers.list_only(*addresses)
        await until(lambda: collection.progress.num_scored >= 200)
        servers.list_none()
        await until(lambda: collection.progress.num_scored >= 300)
        trajectories = check(await task, spec, 100)
    assert all(t.score == float(t.text) for t in trajectories)


async def test_permanent_dns_failure_ends_the_job_and_no_sample(servers: Servers) -> None:
    servers.break_dns()
    async with collecting(make_reward(deadlineSeconds=1), make_prompts(50), Outages(2)) as (collection, _, task):
        with pytest.raises(OutageError, match="last error: no replica exists"):
            await task
        assert collection.progress.num_scored == 0


@pytest.mark.parametrize(
    ("reason", "limits"), [("timeout", {"timeoutSeconds": 2}), ("deadline", {"deadlineSeconds": 12})]
)
async def test_reward_that_is_slow_for_one_group_masks_only_slow_samples(
    servers: Servers, reason: str, limits: dict[str, float]
) -> None:
    await servers.start(SCORE, 2, timeoutSeconds=limits.get("timeoutSeconds", 600))
    spec = make_reward(failurePolicy={"retries": 0}, **limits)
    async with collecting(spec, make_prompts(40, slow=5)) as (_, _, task):
        trajectories = check(await task, spec, 40)
    slow = {(t.group, t.sample) for t in trajectories if t.group == 5 and float(t.text) % 2}
    assert len(slow) == 2
    invalid = {(t.group, t.sample): str(t.results["r"].reason) for t in trajectories if not t.results["r"].valid}
    assert invalid == dict.fromkeys(slow, reason)


async def test_group_reward_that_is_slow_for_one_group_masks_only_that_group(servers: Servers) -> None:
    await servers.start(RANK, 2, timeoutSeconds=2, scope="group")
    spec = make_reward(failurePolicy={"retries": 1}, scope="group", timeoutSeconds=2)
    async with collecting(spec, make_prompts(30, slow=5)) as (_, _, task):
        trajectories = check(await task, spec, 30)
    reasons = {t.group: str(t.results["r"].reason) for t in trajectories if not t.results["r"].valid}
    assert reasons == {5: "timeout"}
    assert all(num_attempts(t) == 2 for t in trajectories if t.group == 5)


async def test_killed_replica_of_a_group_reward_costs_no_group(servers: Servers) -> None:
    addresses = await servers.start(RANK, 2, scope="group")
    spec = make_reward(failurePolicy={"retries": 0}, scope="group")
    async with collecting(spec, make_prompts(250)) as (collection, rewards, task):
        fleet = rewards.clients["r"].replicas.fleet
        await until(lambda: collection.progress.num_scored >= 40 and fleet.replicas[addresses[0]].in_flight)
        servers.kill(addresses[0])
        trajectories = check(await task, spec, 250)
    assert all(t.score is not None for t in trajectories)


async def test_rolling_update_during_a_step_leaves_a_single_version(servers: Servers) -> None:
    old = await servers.start(SCORE, 2)
    new = await servers.start(SCORE + "\n# version 2\n", 2)
    servers.list_only(*old)
    spec = make_reward(failurePolicy={"retries": 0})
    async with collecting(spec, make_prompts(100)) as (collection, rewards, task):
        versions = rewards.clients["r"].replicas.fleet.versions
        await until(lambda: collection.progress.num_scored >= 50)
        servers.list_only(old[1], new[0])
        servers.kill(old[0])
        await until(lambda: len(set(versions())) == 2)  # both exist: the step keeps the old one
        await until(lambda: collection.progress.num_scored >= 100)
        assert len({t.results["r"].version for t in collection.progress.episodes if t.results}) == 1
        servers.list_only(*new)
        servers.kill(old[1])
        trajectories = check(await task, spec, 100)
        assert rewards.clients["r"].num_rescored >= 100
    assert all(t.score == float(t.text) for t in trajectories)
    assert {t.results["r"].version for t in trajectories} == set(versions()), "only the new version"
