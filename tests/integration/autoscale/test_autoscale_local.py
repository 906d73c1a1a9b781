"""An autoscaled reward under `rljob run`'s own backend: 0 -> N -> 0, live, with real reward servers.

Model, rollouts and trainers are left out (head.py beside this file stands for the driver's loop); operator, local
backend, reward client and reward servers are the product's own.
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
from rljob_cli.local.network import claim
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
    """What a user would see, kept: every number of wanted and of ready reward Pods."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seen: list[tuple[float, int, int, str]] = []
        self.stop = lambda: None

    def show(self, snapshot: Snapshot) -> None:
        role = next((role for role in snapshot.roles if role.name == "reward-slow"), None)
        if role is None:
            return
        driver = snapshot.driver.phase if snapshot.driver else ""
        now = (role.desired, role.ready, driver)
        if not self.seen or self.seen[-1][1:] != now:
            self.seen.append((time.monotonic() - self.began, *now))
            print(f"{self.seen[-1][0]:6.1f} s  {driver:9} wanted {role.desired} ready {role.ready}", flush=True)
        if driver == "done" and not role.desired and not role.ready:
            self.stop()

    def say(self, text: str) -> None:
        print(text)

    def close(self) -> None:
        pass


async def watch(folder: Path) -> tuple[Watcher, Run]:
    watcher = Watcher()
    run = Run(build_job(), folder, claim("autoscale", os.environ.get("RLJOB_TEST_BLOCK")), {}, watcher)
    watcher.stop = run._interrupted.set
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await run.execute()
    except TimeoutError:
        pytest.fail(describe_trouble(watcher, folder))
    return watcher, run


def describe_trouble(watcher: Watcher, folder: Path) -> str:
    logs = [f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(folder.rglob("*head*.log"))]
    return "\n".join([f"not over within {DEADLINE_SECONDS} s", *map(str, watcher.seen), *logs])


def test_replicas_come_before_the_burst_and_go_after_it_and_no_request_is_lost() -> None:
    with tempfile.TemporaryDirectory() as folder:
        watcher, run = asyncio.run(watch(Path(folder)))
        found = sorted(Path(folder).rglob("steps.jsonl"))
        rows = [json.loads(line) for line in found[0].read_text().splitlines()]
    said = "\n".join(
        f"{at:6.1f} s  {phase:9} wanted {desired} ready {ready}" for at, desired, ready, phase in watcher.seen
    )
    record = run._cluster.store.job.status.scaling[0] if run._cluster.store.job else None
    print(said, record, yaml.safe_dump(rows), sep="\n")
    assert [row["num_valid"] for row in rows] == [NUM_SAMPLES] * 2, "every sample of both steps is scored"
    wanted = [desired for _, desired, _, _ in watcher.seen]
    ready = [number for *_, number, _ in watcher.seen]
    assert (wanted[0], max(wanted), wanted[-1]) == (0, 3, 0), said
    assert max(ready) >= 2, said
    assert ready[-1] == 0
    told = [event.reason for _, event in run._cluster.store.events]
    scaled = [reason for reason in told if reason.startswith("Scaled")]
    assert (scaled[0], scaled[-1]) == ("ScaledUp", "ScaledDown")
    assert not [reason for reason in told if "Restart" in reason], "Pods that come are no restart"
