"""Harnesses of the driver and of reward clients, and short intervals for every test of this folder."""

import itertools
from functools import partial

import pytest

from rljob_trainer.services.version_tracker import VersionPin
from tests.support import driver_harness
from tests.support.reward_harness import RewardHarness

ABSENT_SECONDS = 0.5
_counter = itertools.count(1)


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch):
    """Poll and give up sooner than in production: the tests wait for these intervals."""
    monkeypatch.setattr("rljob_trainer.replicas.pool._DISCOVERY_SECONDS", 0.05)
    monkeypatch.setattr("rljob_trainer.replicas.pool._TICK_SECONDS", 0.02)
    monkeypatch.setattr("rljob_trainer.services.version_tracker.VersionPin", partial(VersionPin, ABSENT_SECONDS))


@pytest.fixture
async def reward_harness(tmp_path, monkeypatch):
    """Reward servers on loopback addresses, stopped after the test."""
    harness = RewardHarness(tmp_path, monkeypatch)
    yield harness
    await harness.close()


@pytest.fixture
def make_harness(tmp_path, monkeypatch):
    """Makes harnesses, each with its own loopback addresses and folder."""

    def make(folder="harness", **settings):
        sizes = {name: settings.pop(name) for name in ("num_rollouts", "num_rewards") if name in settings}
        network = f"{driver_harness.NETWORK}.{next(_counter) % 250}"
        job = driver_harness.make_job(**settings)
        return driver_harness.DriverHarness(tmp_path / folder, monkeypatch, job, network=network, **sizes)

    return make
