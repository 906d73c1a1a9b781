"""Harnesses of the driver and of reward clients, for every test of this folder."""

import itertools

import pytest

from tests.support import driver_harness
from tests.support.reward_harness import RewardHarness

_counter = itertools.count(1)


@pytest.fixture
async def reward_harness(tmp_path, monkeypatch):
    """Reward servers on loopback addresses, ended with the test."""
    harness = RewardHarness(tmp_path, monkeypatch)
    yield harness
    await harness.close()


@pytest.fixture
def make_harness(tmp_path, monkeypatch):
    """Makes harnesses, each with loopback addresses and a folder of its own."""

    def make(folder="harness", **settings):
        sizes = {name: settings.pop(name) for name in ("num_rollouts", "num_rewards") if name in settings}
        network = str(next(_counter) % 250)
        job = driver_harness.make_job(**settings)
        return driver_harness.DriverHarness(tmp_path / folder, monkeypatch, job, network=network, **sizes)

    return make
