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
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask
from rljob_trainer.driver.collection import Collector
from rljob_trainer.driver.dispatcher import DispatchState
from rljob_trainer.driver.evaluation import EvalLane
from rljob_trainer.driver.live_status import Forecasters, describe_live
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.driver.train_lane import LaneState, TrainLane
from rljob_trainer.episodes.types import Completion, Episode, Group, single_turn
from rljob_trainer.head.environment import Environment, read_environment
from rljob_trainer.head.status_server import StatusServer
from rljob_trainer.replicas.http import open_session
from rljob_trainer.rewards.clients import RewardClients

GENERATE_SECONDS, UPDATE_SECONDS, LINGER_SECONDS = 6.0, 3.0, 600.0


class Agent:
    """Conversations that take a random time and sample nothing."""

    async def run(self, task: EpisodeTask) -> Episode:
        await asyncio.sleep(GENERATE_SECONDS * random.uniform(0.3, 1.0))
        return single_turn(task.prompt, task.group, task.sample, Completion([2], [-1.0], [0], "text", False, "g"))


async def run(environment: Environment) -> None:
    job, board, forecast = environment.job, StatusBoard(), Forecasters.of(environment.job.spec)
    spec = job.spec
    rollouts = SimpleNamespace(describe_wait=lambda: "", replicas=SimpleNamespace(num_waiting=0))
    server = StatusServer(board, lambda: b"")
    await server.start(environment.address)
    async with open_session() as session:
        rewards = RewardClients(spec.rewards, session)
        prompts = [Prompt(i, f"p{i}", [1], ground_truth="1") for i in range(spec.schedule.prompts_per_step)]
        collector = Collector(Agent(), rollouts, rewards, spec.rewards)  # type: ignore[arg-type]
        dataset = PromptSet(len(prompts), dict(enumerate(prompts)))
        lane = TrainLane(collector, dataset, spec, "g", LaneState(dispatch=DispatchState()))
        lanes = (lane, EvalLane(collector, (), spec, "g"))
        board.describe_live = lambda status: describe_live(status, lanes, collector, forecast)
        board.update(total_steps=spec.schedule.steps)
        await rewards.start()
        for step in range(1, spec.schedule.steps + 1):
            started_at = time.monotonic()
            forecast.record_begin(collector)
            lane.begin_step(spec.schedule.steps)
            found: list[Group] = []
            while missing := len(prompts) - len(found):
                found += await lane.take(missing)
            results = [result for group in found for t in group.episodes for result in t.results.values()]
            record(environment.run_dir, step, [result.valid for result in results], time.monotonic() - started_at)
            with collector.phases.within("update", time.monotonic):
                await asyncio.sleep(UPDATE_SECONDS)
            lane.finish_step()
            forecast.record_end(lane.progress, collector, UPDATE_SECONDS)
            board.update(step=step)
        board.set_phase("done")
        await asyncio.sleep(LINGER_SECONDS)


def record(folder: Path, step: int, valid: list[bool], seconds: float) -> None:
    row = {"step": step, "num_valid": sum(valid), "num_invalid": len(valid) - sum(valid), "seconds": seconds}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    import os

    asyncio.run(run(read_environment(dict(os.environ))))
