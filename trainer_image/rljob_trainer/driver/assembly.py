"""What a driver is made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rljob_api.manifest.evaluation import HeldOutSet
from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.schedule import Schedule
from rljob_inputs.prompts import Prompt
from rljob_trainer.driver.collection import CollectionPlan, Collector
from rljob_trainer.driver.evaluation import EvalLane, HeldOut
from rljob_trainer.driver.ledger import Ledger
from rljob_trainer.driver.model_check import ModelCheck
from rljob_trainer.driver.ports import StartTrainer, Trainer, Turns
from rljob_trainer.driver.reports import Reports
from rljob_trainer.driver.train_lane import TrainLane
from rljob_trainer.driver.turns import Separate, Shared
from rljob_trainer.feed.prompt_feed import PromptSource
from rljob_trainer.mirror.mirror import Mirror
from rljob_trainer.outages.registry import Outages
from rljob_trainer.replicas.engines import TrainerEngines


@dataclass(frozen=True)
class Datasets:
    train: Sequence[PromptSource]
    """In the order of the job."""
    held_out: Mapping[str, Sequence[Prompt]]
    """By the name of an evaluation set."""


@dataclass(frozen=True)
class DriverParts:
    start_trainer: StartTrainer
    collector: Collector
    """With the clients of the rollouts and of the rewards."""
    reports: Reports
    data: Datasets
    model: str
    """The resolved source of spec.model, for the export."""
    read_schedule: Callable[[], Schedule | None]
    """Reads the current schedule; None: it is still the one at the job's start."""
    engines: TrainerEngines | None = None
    """Rollouts that share the trainer's devices. They sleep when `start_trainer` places ranks."""
    outages: Outages = field(default_factory=Outages)
    """Which of what the job depends on is away."""
    copies: Mirror | None = None
    """The copy of the run's files in object storage. None: there is none."""
    check: ModelCheck | None = None
    """Compares rollouts with the trainer at the start. None: nothing trains."""


def plan_set(spec: RLJobSpec, each: HeldOutSet, parts: DriverParts, generation: str) -> HeldOut:
    assert each.sampling is not None, "the job's open settings are not resolved"
    rewards = [reward for reward in spec.rewards if reward.name in each.rewards]
    plan = CollectionPlan(
        "eval", 0, each.samples_per_prompt, each.sampling, spec.schedule.seed, generation, rewards, each.name
    )
    return HeldOut(each, parts.data.held_out[each.name], plan)


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
