"""What a driver is made of, and the loop of one trainer group."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rljob_api.manifest.evaluation import HeldOutSet
from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.schedule import Schedule
from rljob_inputs.prompts import Prompt
from rljob_trainer.algorithms.base import AlgorithmCode
from rljob_trainer.driver.between_steps import BetweenSteps
from rljob_trainer.driver.cadence import Cadence
from rljob_trainer.driver.checkpointer import Checkpointer
from rljob_trainer.driver.collection import CollectionPlan, Collector
from rljob_trainer.driver.evaluation import EvalLane, HeldOut
from rljob_trainer.driver.exporter import Exporter
from rljob_trainer.driver.ledger import Ledger
from rljob_trainer.driver.loop import TrainLoop
from rljob_trainer.driver.model_check import ModelCheck
from rljob_trainer.driver.ports import Copies, Engines, StartTrainer, Trainer, Turns
from rljob_trainer.driver.publisher import Publisher
from rljob_trainer.driver.reports import Reports
from rljob_trainer.driver.train_lane import TrainLane, read_lane_state
from rljob_trainer.driver.turns import Separate, Shared
from rljob_trainer.driver.updates import StepOutcome, StepUpdates
from rljob_trainer.feed.prompt_feed import PromptFeed, PromptSource
from rljob_trainer.outages.registry import Outages
from rljob_trainer.services.demand import Forecaster


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
    engines: Engines | None = None
    """Rollouts that share the trainer's devices. They sleep when `start_trainer` places ranks."""
    outages: Outages = field(default_factory=Outages)
    """Which of what the job depends on is away."""
    copies: Copies | None = None
    """The copy of the run's files in object storage. None: there is none."""
    check: ModelCheck | None = None
    """Compares rollouts with the trainer at the start. None: nothing trains."""


def build_loop(
    spec: RLJobSpec,
    parts: DriverParts,
    trainer: Trainer,
    ledger: Ledger,
    generation: str,
    *,
    algorithm: AlgorithmCode,
    cadence: Cadence,
    checkpoints: Checkpointer,
    exporter: Exporter,
    follow_schedule: Callable[[], Awaitable[None]],
    forecaster: Forecaster,
    judge: Callable[[StepOutcome], None],
) -> TrainLoop:
    """Return the loop of `trainer`, whose weights are published as `generation`, from where the ledger's history is.
    The others are as in TrainLoop."""
    collector, seed = parts.collector, spec.schedule.seed
    train_plan = CollectionPlan(
        "train", 0, spec.algorithm.group_size, spec.rollout.sampling, seed, generation, spec.training_rewards
    )
    state = read_lane_state(ledger.history)
    lane = TrainLane(
        collector,
        PromptFeed(parts.data.train, state.feed, spec.data.curriculum, seed=seed, shuffle=spec.data.shuffle),
        train_plan,
        spec.schedule,
        algorithm,
        state,
        rewards_sleep=bool(spec.models_in_trainer),
    )
    held_out = EvalLane(collector, [_plan_set(spec, each, parts, generation) for each in spec.held_out_sets])
    turns = _build_turns(spec, parts.engines, trainer, ledger, lane, held_out)
    return TrainLoop(
        between=BetweenSteps(
            cadence,
            follow_schedule,
            held_out,
            checkpoints,
            ledger,
            decides_best=spec.evaluation.best.set if spec.evaluation.best else "",
        ),
        trainer=trainer,
        turns=turns,
        lane=lane,
        updates=StepUpdates(
            spec.schedule,
            algorithm,
            trainer,
            ledger.clock.training,
            full_tokens=spec.trainer.micro_batch_tokens * spec.trainer.num_ranks,
        ),
        publisher=Publisher(
            trainer,
            turns,
            collector.rollouts,
            parts.reports.board,
            ledger,
            held_out,
            spans_updates=lane.schedule.spans_updates,
        ),
        ledger=ledger,
        exporter=exporter,
        collector=collector,
        forecaster=forecaster,
        judge=judge,
        check=parts.check,
    )


def _plan_set(spec: RLJobSpec, each: HeldOutSet, parts: DriverParts, generation: str) -> HeldOut:
    assert each.sampling is not None, "the job's open settings are not resolved"
    rewards = [reward for reward in spec.rewards if reward.name in each.rewards]
    plan = CollectionPlan(
        "eval", 0, each.samples_per_prompt, each.sampling, spec.schedule.seed, generation, rewards, each.name
    )
    return HeldOut(each, parts.data.held_out[each.name], plan)


def _build_turns(
    spec: RLJobSpec, engines: Engines | None, trainer: Trainer, ledger: Ledger, lane: TrainLane, held_out: EvalLane
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
