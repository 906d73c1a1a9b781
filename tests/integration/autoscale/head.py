"""A driver without model, rollouts and trainers: the real collector, reward client, forecast and status server.

Its steps have a generation, a burst of rewards and an update of fixed durations. After the last step it runs on
without demand, so that the test observes the scale-down.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace

from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.models.defaults import resolve
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.driver.collection import CollectionPlan, Collector
from rljob_trainer.driver.dispatcher import DispatchState
from rljob_trainer.driver.evaluation import EvalLane
from rljob_trainer.driver.live_status import describe_live
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.driver.train_lane import LaneState, TrainLane
from rljob_trainer.episodes.types import Completion, Episode, Group, single_turn
from rljob_trainer.feed.prompt_feed import PromptFeed, PromptSource
from rljob_trainer.head.environment import Environment, read_environment
from rljob_trainer.head.status_server import StatusServer
from rljob_trainer.replicas.http import open_session
from rljob_trainer.rewards.groups import RequestBuilder, RewardClients
from rljob_trainer.services.demand import Forecaster

GENERATE_SECONDS, UPDATE_SECONDS, LINGER_SECONDS = 6.0, 3.0, 600.0


class Agent:
    """Conversations that take a random time and sample nothing."""

    async def run(self, task: EpisodeTask) -> list[Episode]:
        await asyncio.sleep(GENERATE_SECONDS * random.uniform(0.3, 1.0))
        completion = Completion([2], [-1.0], [0], "text", False, "g")
        return [single_turn(task.prompt, task.group, task.sample, completion)]


async def run(environment: Environment) -> None:
    spec = resolve(environment.job.spec, None).spec
    board = StatusBoard()
    rollouts = SimpleNamespace(describe_wait=lambda: "", replicas=SimpleNamespace(num_waiting=0))
    server = StatusServer(board, lambda: b"")
    await server.start(environment.address)
    async with open_session() as session:
        rewards = RewardClients(spec.rewards, session)
        prompts = [Prompt(i, f"p{i}", [1], ground_truth="1") for i in range(spec.schedule.prompts_per_step)]
        collector = Collector(Agent(), rollouts, rewards, RequestBuilder(None))  # type: ignore[arg-type]
        dataset = PromptSet(len(prompts), dict(enumerate(prompts)))
        algorithm, size, seed = build_algorithm(spec), spec.algorithm.group_size, spec.schedule.seed
        plan = CollectionPlan("train", 0, size, spec.rollout.sampling, seed, "g", spec.rewards)
        state = LaneState(dispatch=DispatchState())
        feed = PromptFeed([PromptSource("train", 1.0, dataset)], state.feed, seed=seed, shuffle=spec.data.shuffle)
        lane = TrainLane(collector, feed, plan, spec.schedule, algorithm, state)
        lanes = (lane, EvalLane(collector, ()))
        forecaster = Forecaster.of(spec.schedule, size, needs_whole_step=algorithm.needs.whole_step)
        board.update(total_steps=spec.schedule.steps)
        await rewards.start()
        with board.live(lambda status: describe_live(status, lanes, collector, forecaster)):
            await train(environment, board, lane, collector, forecaster)
            board.set_phase("done")
            await asyncio.sleep(LINGER_SECONDS)


async def train(
    environment: Environment, board: StatusBoard, lane: TrainLane, collector: Collector, forecaster: Forecaster
) -> None:
    schedule = environment.job.spec.schedule
    for step in range(1, schedule.steps + 1):
        started_at = time.monotonic()
        forecaster.record_begin(time.monotonic())
        lane.begin_step(schedule.steps)
        found: list[Group] = []
        while missing := schedule.prompts_per_step - len(found):
            found += await lane.take(missing)
        results = [result for group in found for t in group.episodes for result in t.results.values()]
        record(environment.run_dir, step, [result.valid for result in results], time.monotonic() - started_at)
        with collector.phases.within("update", time.monotonic):
            await asyncio.sleep(UPDATE_SECONDS)
        lane.finish_step()
        forecaster.record_end(lane.progress, UPDATE_SECONDS)
        board.update(step=step)


def record(folder: Path, step: int, valid: list[bool], seconds: float) -> None:
    row = {"step": step, "num_valid": sum(valid), "num_invalid": len(valid) - sum(valid), "seconds": seconds}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    import os

    asyncio.run(run(read_environment(dict(os.environ))))
