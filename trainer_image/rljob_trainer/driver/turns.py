"""Whose turn it is on the devices that trainer and rollouts share.

    rollouts' turn --> no completion is open --> rollouts sleep --> ranks restore their state --> trainer's turn
    trainer's turn --> publish, announce --> ranks free the devices --> rollouts wake --> rollouts' turn: they load,
                                                                        from a file or from the ranks

Served models in the trainer's Pods, such as those of rewards, sleep and wake with the rollouts. So all scores of the
turn are there before it ends.

Invariant: the trainer works only while all rollouts sleep, and a rollout only after all ranks have freed the devices.
What fails in between ends the group, and the next one begins with the trainer's turn.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from rljob_api.manifest.job import RLJobSpec
from rljob_api.wire.weights import EnginesReport, Turn, WeightManifest
from rljob_trainer.driver.evaluation import EvalLane
from rljob_trainer.driver.ledger import Ledger
from rljob_trainer.driver.ports import Trainer, Turns
from rljob_trainer.driver.run_clock import RunClock
from rljob_trainer.driver.train_lane import TrainLane
from rljob_trainer.replicas.engines import TrainerEngines

RecordTurn = Callable[[Mapping[str, float], Mapping[str, int], EnginesReport], None]
"""Records a change of turns: the seconds of its parts, and what held how much, as in TurnNumbers."""


class Separate:
    """Trainer and rollouts have devices of their own: each has its turn all the time."""

    async def give_to_trainer(self) -> None: ...

    async def give_to_rollouts(self, manifest: WeightManifest) -> None: ...


@dataclass
class Shared:
    """The turns of one trainer group, which begins with the trainer's.

    `until_idle`: returns once no completion is open, and none can follow in this turn.
    """

    engines: TrainerEngines
    trainer: Trainer
    clock: RunClock
    record: RecordTurn
    until_idle: Callable[[], Awaitable[None]]
    _turn: Turn = "trainer"

    async def give_to_trainer(self) -> None:
        if self._turn == "trainer":
            return
        await self.until_idle()
        with self.clock.phase("sleep"):
            started = time.monotonic()
            await self.trainer.withdraw_weights()
            report = await self.engines.sleep()
            asleep = time.monotonic()
            await self.trainer.restore()
        self._turn = "trainer"
        seconds = {"sleep": asleep - started, "restore": time.monotonic() - asleep}
        self.record(seconds, _name_bytes("asleep", report), report)

    async def give_to_rollouts(self, manifest: WeightManifest) -> None:
        assert self._turn == "trainer", "weights are published in the trainer's turn"
        with self.clock.phase("wake"):
            started = time.monotonic()
            memory = await self.trainer.free()
            freed = time.monotonic()
            report = await self.engines.wake(manifest)
            await self.trainer.offer_weights()
        self._turn = "rollouts"
        seconds = {"free": freed - started, "wake": time.monotonic() - freed}
        held = {"trainer_update": memory.before, "trainer_freed": memory.after}
        self.record(seconds, held | _name_bytes("awake", report), report)


def _name_bytes(state: str, report: EnginesReport) -> dict[str, int]:
    models = {} if report.model_bytes is None else {f"models_{state}": report.model_bytes}
    return {f"rollouts_{state}": report.num_bytes} | models


def build_turns(
    spec: RLJobSpec,
    engines: TrainerEngines | None,
    trainer: Trainer,
    ledger: Ledger,
    lane: TrainLane,
    held_out: EvalLane,
) -> Turns:
    if engines is None:
        return Separate()

    async def until_idle() -> None:
        await lane.wait_until_scored()
        with ledger.clock.phase("evaluate"):
            if spec.models_in_trainer:
                await held_out.wait_until_scored()
            else:
                await held_out.wait_until_generated()

    return Shared(engines, trainer, ledger.clock, ledger.record_turn, until_idle)
