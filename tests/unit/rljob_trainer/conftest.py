"""Makes `driver_world` and `reward_world` importable: pytest's importlib mode puts no folder on the path."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

_counter = itertools.count(1)


def _load(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


_load("reward_world")
driver_world = _load("driver_world")


@pytest.fixture
async def reward_world(tmp_path, monkeypatch):
    """Reward servers on loopback addresses, ended with the test."""
    world = _load("reward_world").RewardWorld(tmp_path, monkeypatch)
    yield world
    await world.close()


@pytest.fixture
def make_world(tmp_path, monkeypatch):
    """Makes worlds, each with loopback addresses and a folder of its own."""

    def make(folder="world", **settings):
        sizes = {name: settings.pop(name) for name in ("num_rollouts", "num_rewards") if name in settings}
        network = str(next(_counter) % 250)
        job = driver_world.make_job(**settings)
        return driver_world.World(tmp_path / folder, monkeypatch, job, network=network, **sizes)

    return make
