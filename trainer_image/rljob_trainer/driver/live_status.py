"""The parts of /status that change by the second: what the driver waits for, and the demand on the rewards and on the
services of the agent. Pure."""

import time

from rljob_api.wire.driver_status import DriverStatus
from rljob_trainer.driver.collection import Collector
from rljob_trainer.driver.evaluation import EvalLane
from rljob_trainer.driver.train_lane import TrainLane
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.services.demand import Forecaster, OpenEpisodes

_COLLECTING = ("generate", "score", "evaluate")


def describe_live(
    status: DriverStatus, lanes: tuple[TrainLane, EvalLane] | None, collector: Collector, forecaster: Forecaster
) -> DriverStatus:
    """`lanes`: of the trainer group; None while none is ready."""
    train, held_out = lanes or (None, None)
    open_train = train.progress if train and train.is_in_step and train.progress.num_unscored else None
    open_eval = held_out.progress if held_out and held_out.step is not None and held_out.progress.num_unscored else None
    now, progress = time.monotonic(), open_train or open_eval or CollectionProgress()
    is_last = status.phase == "done" or (train is not None and train.num_collected >= status.total_steps > 0)
    is_open = progress in (open_train, open_eval)
    forecast = forecaster.predict_scores(progress, now, is_open=is_open, is_last=is_last)
    if open_train and open_eval:
        forecast = forecast.plus(open_eval.num_samples, open_eval.num_unscored)
    held_out_progress = open_eval or CollectionProgress("eval")
    of_evaluation = forecaster.predict_scores(held_out_progress, now, is_open=open_eval is not None, is_last=True)
    status.demand = collector.rewards.demand(forecast, of_evaluation)
    episodes = forecaster.predict_episodes(_find_episodes(status, lanes), now)
    status.demand |= {name: forecaster.demand_on(name, load, episodes) for name, load in collector.loads().items()}
    if train is None or status.phase == "done":
        return status
    status.phase = collector.phases.phase
    status.schedule = train.describe(status.schedule)
    if status.phase in ("sleep", "wake"):
        return status  # which says what the rollouts of a Pod wait for
    is_collecting = status.phase in _COLLECTING
    waits = collector.rollouts.describe_wait() if is_collecting or status.phase == "sync" else ""
    if is_collecting:
        waits = waits or _describe_collection(progress, collector, status.schedule.groups_due)
    status.waits_for = waits
    return status


def _find_episodes(status: DriverStatus, lanes: tuple[TrainLane, EvalLane] | None) -> OpenEpisodes:
    """Return the episodes that have not ended: the agent's services have no more to do once they have."""
    if lanes is None:
        return OpenEpisodes(is_last=status.phase == "done")
    train, held_out = lanes
    is_evaluating = held_out.step is not None and held_out.progress.num_generated < held_out.progress.num_samples
    return OpenEpisodes(
        train=train.progress if train.is_in_step and train.is_generating() else None,
        eval=held_out.progress if is_evaluating else None,
        at_once=train.episodes_at_once,
        is_last=status.phase == "done" or train.num_generated >= status.total_steps > 0,
    )


def _describe_collection(progress: CollectionProgress, collector: Collector, num_due: int | None) -> str:
    num_open = progress.num_samples - progress.num_generated
    calls = collector.services.describe_wait() if collector.services else ""
    num_sampling = collector.roles.num_working("rollouts")
    if num_open > 0 and calls and collector.services and collector.services.has_runner:
        return f"waits for {calls}" + (f", {num_sampling} wait for a completion" if num_sampling else "")
    if num_open > 0 and calls and not num_sampling:
        return f"waits for {calls}"
    if num_open > 0:
        num_queued = collector.rollouts.replicas.num_waiting
        queued = f", {num_queued} of them for a free rollout" if num_queued else ""
        due = f", {num_due} groups are due" if num_due and progress.lane == "train" else ""
        called = f", {calls}" if calls else ""
        return f"waits for {num_open} of {progress.num_samples} completions{queued}{due}{called}"
    return collector.rewards.describe_wait(progress.num_unscored, progress.num_samples)
