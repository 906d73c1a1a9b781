"""An autoscaled reward under `rljob run`: 0 -> N -> 0 replicas, with real reward servers.

There are no model, rollouts and trainers, and head.py stands for the driver's loop. Operator, local backend, reward
client and reward servers are the product's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.manifest.job import RLJob
from rljob_cli.local.network import claim_block
from rljob_cli.run.command import Run
from rljob_cli.run.snapshot import Snapshot

HEAD = Path(__file__).with_name("head.py")
DEADLINE_SECONDS = 420
REWARD = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(1.0)
    return 1.0
"""
NUM_SAMPLES = 48


def build_job() -> RLJob:
    def stand_in(role: str, command: list[str]) -> dict[str, Any]:
        return {"template": {"spec": {"containers": [{"name": role, "command": command}]}}}

    reward = {"name": "slow", "function": {"inline": REWARD}, "slots": 4}
    reward["autoscaling"] = {"minReplicas": 0, "maxReplicas": 3, "scaleDownAfterSeconds": 2}
    spec = {
        "model": {"source": "/nowhere"},
        "data": {"train": {"source": "/nowhere.jsonl"}},
        "rewards": [reward],
        "algorithm": {"groupSize": 4},
        "schedule": {"steps": 2, "promptsPerStep": NUM_SAMPLES // 4},
        "head": stand_in("head", [sys.executable, str(HEAD)]),
        "trainer": stand_in("trainer", ["sleep", "3600"]),
        "rollout": stand_in("rollout", ["sleep", "3600"]),
    }
    return RLJob.model_validate({"metadata": {"name": "scaled"}, "spec": spec})


class Watcher:
    """Records each number of desired and of ready reward Pods that a user would see."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.seen: list[tuple[float, int, int, str]] = []
        self.stop = lambda: None

    def begin(self, earlier: Snapshot) -> None:
        pass

    def show(self, snapshot: Snapshot) -> None:
        role = next((role for role in snapshot.roles if role.name == "reward-slow"), None)
        if role is None:
            return
        driver = snapshot.driver.phase if snapshot.driver else ""
        now = (role.desired, role.ready, driver)
        if not self.seen or self.seen[-1][1:] != now:
            self.seen.append((time.monotonic() - self.started_at, *now))
            print(f"{self.seen[-1][0]:6.1f} s  {driver:9} wanted {role.desired} ready {role.ready}", flush=True)
        if driver == "done" and not role.desired and not role.ready:
            self.stop()

    def say(self, text: str) -> None:
        print(text)

    def close(self) -> None:
        pass


async def watch(folder: Path) -> tuple[Watcher, Run]:
    watcher = Watcher()
    run = Run(build_job(), folder, claim_block("autoscale", os.environ.get("RLJOB_TEST_BLOCK")), {}, watcher)
    watcher.stop = run._interrupted.set
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await run.execute()
    except TimeoutError:
        pytest.fail(describe_failure(watcher, folder))
    return watcher, run


def describe_failure(watcher: Watcher, folder: Path) -> str:
    logs = [f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(folder.rglob("*head*.log"))]
    return "\n".join([f"not over within {DEADLINE_SECONDS} s", *map(str, watcher.seen), *logs])


def test_replicas_follow_the_demand_of_a_burst_without_losing_requests() -> None:
    with tempfile.TemporaryDirectory() as folder:
        watcher, run = asyncio.run(watch(Path(folder)))
        found = sorted(Path(folder).rglob("steps.jsonl"))
        rows = [json.loads(line) for line in found[0].read_text().splitlines()]
    seen = "\n".join(
        f"{at:6.1f} s  {phase:9} wanted {desired} ready {ready}" for at, desired, ready, phase in watcher.seen
    )
    record = run._cluster.store.job.status.scaling[0] if run._cluster.store.job else None
    print(seen, record, yaml.safe_dump(rows), sep="\n")
    assert [row["num_valid"] for row in rows] == [NUM_SAMPLES] * 2, "every sample of both steps must be scored"
    wanted = [desired for _, desired, _, _ in watcher.seen]
    ready = [number for *_, number, _ in watcher.seen]
    assert (wanted[0], max(wanted), wanted[-1]) == (0, 3, 0), seen
    assert max(ready) >= 2, seen
    assert ready[-1] == 0
    reasons = [event.reason for event in run._cluster.store.events]
    scaled = [reason for reason in reasons if reason.startswith("Scaled")]
    assert (scaled[0], scaled[-1]) == ("ScaledUp", "ScaledDown")
    assert not [reason for reason in reasons if "Restart" in reason], "a new Pod is not a restart"
