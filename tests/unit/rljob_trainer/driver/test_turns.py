"""Turns on shared devices: their order, what a failure leaves, and that a repeated change is one."""

import contextlib

import pytest

from rljob_api.errors import TransientError
from rljob_api.wire.weights import EnginesReport, WeightManifest
from rljob_trainer.driver.ports import FreedMemory
from rljob_trainer.driver.turns import Separate, Shared

MANIFEST = WeightManifest(generation="g", version=1, url="http://x", num_bytes=1, file_hash="s", checksum="c")


class World:
    """Trainer, engines and books: each part records what it is asked for, and `fails` names the one that fails."""

    def __init__(self):
        self.events, self.seconds, self.held, self.num_restarts, self.fails = [], {}, {}, 0, ""
        self.model_bytes = None
        self.turns = Shared(self, self, self, self.record_turn, self.until_idle)

    def record(self, event):
        self.events.append(event)
        if event == self.fails:
            self.fails = ""
            raise TransientError(event)

    async def until_idle(self):
        self.record("idle")

    async def sleep(self):
        self.record("sleep")
        return EnginesReport(num_running=2, num_restarts=0, num_bytes=10, model_bytes=self.model_bytes, seconds=0.1)

    async def wake(self, manifest):
        self.record(f"wake {manifest.key}")
        return EnginesReport(num_running=2, num_restarts=1, num_bytes=100, model_bytes=self.model_bytes, seconds=0.1)

    async def free(self):
        self.record("free")
        return FreedMemory(200, 50)

    async def restore(self):
        self.record("restore")

    async def offer_weights(self):
        self.record("offer")

    async def withdraw_weights(self):
        self.record("withdraw")

    @contextlib.contextmanager
    def phase(self, name):
        self.events.append(f"[{name}")
        try:
            yield
        finally:
            self.events.append("]")

    def record_turn(self, seconds, num_bytes, report):
        self.seconds |= seconds
        self.held |= num_bytes
        self.num_restarts = report.num_restarts


GIVE_TO_ROLLOUTS = ["[wake", "free", "wake g:1", "offer", "]"]
GIVE_TO_TRAINER = ["idle", "[sleep", "withdraw", "sleep", "restore", "]"]


async def test_group_begins_with_the_trainers_turn_and_each_change_has_its_order():
    world = World()
    await world.turns.give_to_trainer()
    assert world.events == [], "the ranks have started while the rollouts slept"
    await world.turns.give_to_rollouts(MANIFEST)
    await world.turns.give_to_trainer()
    await world.turns.give_to_trainer()
    assert world.events == GIVE_TO_ROLLOUTS + GIVE_TO_TRAINER


async def test_books_get_seconds_and_memory_of_both_turns():
    world = World()
    await world.turns.give_to_rollouts(MANIFEST)
    await world.turns.give_to_trainer()
    assert world.held == {"trainer_update": 200, "trainer_freed": 50, "rollouts_awake": 100, "rollouts_asleep": 10}
    assert world.seconds.keys() == {"free", "wake", "sleep", "restore"}
    world.model_bytes = 7
    await world.turns.give_to_rollouts(MANIFEST)
    await world.turns.give_to_trainer()
    assert (world.held["models_awake"], world.held["models_asleep"]) == (7, 7)
    assert min(world.seconds.values()) >= 0


@pytest.mark.parametrize("fails", ["idle", "withdraw", "sleep", "restore"])
async def test_change_to_the_trainer_that_failed_is_repeated_from_its_begin(fails):
    world = World()
    await world.turns.give_to_rollouts(MANIFEST)
    world.fails = fails
    with pytest.raises(TransientError, match=fails):
        await world.turns.give_to_trainer()
    world.events = []
    await world.turns.give_to_trainer()
    assert world.events == GIVE_TO_TRAINER


@pytest.mark.parametrize("fails", ["free", "wake g:1", "offer"])
async def test_change_to_the_rollouts_that_failed_is_repeated_from_its_begin(fails):
    world = World()
    world.fails = fails
    with pytest.raises(TransientError, match=fails):
        await world.turns.give_to_rollouts(MANIFEST)
    world.events = []
    await world.turns.give_to_rollouts(MANIFEST)
    assert world.events == GIVE_TO_ROLLOUTS


async def test_separate_devices_have_no_turns():
    await Separate().give_to_trainer()
    await Separate().give_to_rollouts(MANIFEST)
