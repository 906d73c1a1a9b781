"""`helm upgrade` with running jobs replaces no Pod, and the jobs finish; `kubectl rljob restart` rolls on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from harness import Cluster, Job, Manifest, install, log_step

ROLES = ("head", "trainer", "rollout", "reward")
NEW_IMAGES = {
    "defaults.trainerImage": "registry.invalid/rljob/trainer:next",
    "defaults.rewardImage": "registry.invalid/rljob/reward:next",
}
"""No registry has them: a Pod that was replaced could not start."""

NUM_STEPS, REWARD_SECONDS = 24, 1.5
"""The 16 samples of a step need 8 slots twice, so the rewards alone take 72 s, and both upgrades half of that: the jobs
still run after them."""


@pytest.fixture
def upgrade(cluster: Cluster) -> Iterator[Callable[..., None]]:
    """Upgrade the release to other values, and restore it afterwards."""

    def upgrade(**values: str) -> None:
        log_step(f"helm upgrade with {values}")
        install(cluster, values)

    yield upgrade
    upgrade()


def slow_rewards() -> list[Manifest]:
    [reward] = yaml.safe_load((Path(__file__).parent / "job.yaml").read_text())["spec"]["rewards"]
    source = reward["function"]["inline"]
    assert "sleep(0.3)" in source
    reward["function"]["inline"] = source.replace("sleep(0.3)", f"sleep({REWARD_SECONDS})")
    return [reward]


def read_uids(job: Job) -> dict[str, list[str]]:
    return {role: [pod["metadata"]["uid"] for pod in job.cluster.pods(job.name, role)] for role in ROLES}


def read_images(job: Job) -> dict[str, str]:
    return {role["name"]: role["image"] for role in job.status["roles"]}


def test_upgrade_replaces_no_pod_of_running_jobs(
    cluster: Cluster, submit: Callable[..., Job], upgrade: Callable[..., None]
) -> None:
    one_of_each = {"trainer": {"replicas": 1}, "rollout": {"replicas": 1}}
    slow = {"rewards": slow_rewards(), "schedule": {"steps": NUM_STEPS}}
    jobs = [submit(name, **one_of_each, **slow) for name in ("upgrade-one", "upgrade-two")]
    for job in jobs:
        job.wait_for_step(1)
        job.wait_for("the images in the status", lambda job=job: all(read_images(job).values()))
    before = {job.name: (read_uids(job), read_images(job)) for job in jobs}
    upgrade(**NEW_IMAGES)
    for job in jobs:
        job.wait_for_step(job.step() + 2)
        assert (read_uids(job), read_images(job)) == before[job.name], "an upgrade restarts nothing"
    upgrade(**{"defaults.labels.cost-center": "research"})
    one, two = jobs
    old = read_uids(one)["rollout"]
    cluster.rljob("restart", one.name, "--role", "rollout")

    def is_rolled() -> bool:
        pods = cluster.pods(one.name, "rollout")
        return bool(pods) and all(
            pod["metadata"]["uid"] not in old and pod["metadata"]["labels"].get("cost-center") == "research"
            for pod in pods
        )

    one.wait_for("a rollout Pod of the new operator", is_rolled)
    assert {**read_uids(one), "rollout": old} == before[one.name][0], "only the requested role was restarted"
    for job in jobs:
        job.wait_for_success()
    assert [role["restarts"] for role in two.status["roles"]] == [0, 0, 0, 0]
