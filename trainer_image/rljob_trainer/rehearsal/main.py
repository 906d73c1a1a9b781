"""The program of a rehearsal: plays one episode on the first row, scores it, and writes it to the trajectory log.

The agent loop, the services and the rewards are those of training, with the environment of the head. Invariant: without
an error, the log has one file, of step 0 and the lane eval, with one row.
"""

import asyncio
import json
import logging
import os
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.errors import RLJobError, UserError
from rljob_api.manifest.job_sections import Data, Model
from rljob_api.run.folder import trajectory_file
from rljob_api.wire.contract import ExitCode
from rljob_api.wire.logs import configure_logging
from rljob_api.wire.termination import end_program
from rljob_inputs.data.prompts import build_prompts
from rljob_inputs.data.rows import read_rows
from rljob_inputs.hub.repository import HubAccess
from rljob_inputs.models.own_settings import load_model_settings
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask
from rljob_trainer.algorithms.rows import score_group
from rljob_trainer.calls.services import AgentServices
from rljob_trainer.concurrency import run_all
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.driver.collection import CollectionPlan
from rljob_trainer.episodes.types import Episode, Group, has_own_reward
from rljob_trainer.gateway.forwarding import watch_models
from rljob_trainer.head.agent import start_agent
from rljob_trainer.head.environment import Environment, read_environment
from rljob_trainer.head.tokenizer import load_tokenizer
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.trajectory_log import write_file
from rljob_trainer.outages.registry import Outages
from rljob_trainer.rehearsal.given_answers import (
    GENERATION,
    GivenAnswers,
    end_after_given_answers,
    find_end_id,
    limit_turns,
)
from rljob_trainer.replicas.http import open_session
from rljob_trainer.rewards.groups import RewardClients
from rljob_trainer.rewards.requests import RequestBuilder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What the command passes, as JSON."""

    answers: list[str]
    rewards: list[str]
    """Names of those that are served."""


def read_settings(path: Path) -> Settings:
    return Settings(**json.loads(path.read_text(encoding="utf-8")))


def read_first_prompt(environment: Environment, data: Data, tokenizer: Any) -> Prompt:
    access = HubAccess.from_environment(os.environ)
    source, *_ = environment.train_data
    rows = read_rows(data.train, source, split="train", access=access)
    prompt = next(build_prompts(data, data.train, rows, tokenizer, split="train"), None)
    if prompt is None:
        raise UserError(f"spec.data.train.source: {source} has no rows")
    return prompt


async def rehearse(environment: Environment, settings: Settings) -> None:
    model_settings = load_model_settings(environment.job, environment.model)
    spec = model_settings.job.spec
    tokenizer = load_tokenizer(environment.model, spec.model)
    # Raises before any server is started.
    template = ChatTemplate(tokenizer, spec.agent.tool_format, spec.data.chat_template_arguments)
    prompt = read_first_prompt(environment, spec.data, tokenizer)
    specs = [reward for reward in spec.rewards if reward.name in settings.rewards]
    sampling = spec.evaluation.sampling
    assert sampling is not None, "the job's open settings are not resolved"
    plan = CollectionPlan("eval", 0, 1, sampling, spec.schedule.seed, GENERATION)
    end_id = find_end_id(template, tokenizer)
    answers = GivenAnswers(settings.answers, template, end_id, plan.sampling.answer_tokens, plan.sampling.stop)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        outages = Outages(spec.outage_seconds)
        models = watch_models(spec.agent.models, outages)
        services = AgentServices(spec.services, session, outages=outages, runner_calls=[*models.values()])
        rewards = RewardClients(specs, session, tokenizer, outages)
        for client in (services, rewards):
            await client.start()
            stack.push_async_callback(client.close)
        limited = spec.model_copy(update={"agent": limit_turns(spec.agent, len(settings.answers))})
        room = model_settings.context_length
        metrics = PrometheusMetrics()  # no one reads them
        address = environment.address
        agent = await start_agent(stack, limited, tokenizer, room, services, address, metrics, outages, models)
        seed = plan.sample_seed(prompt.index, 0, 0)
        task = EpisodeTask(plan.episode_id(0, 0), plan.lane, prompt, 0, 0, answers, seed, needs_reward=not spec.rewards)
        trajectories = await agent.loop.run(task)
        if answers.is_used_up:
            for trajectory in trajectories:
                end_after_given_answers(trajectory)
        rewards.begin()
        scorer = rewards.open_group(plan.group_id(0), plan.lane, 1)
        requests = RequestBuilder(tokenizer, spec.agent.completion, spec.schedule.steps)
        playable = [each for each in trajectories if each.failure is None and (specs or has_own_reward(each))]
        scorer.expect(len(playable))

        async def score(trajectory: Episode) -> None:
            request = requests.build(plan.trajectory_id(trajectory), plan.lane, prompt, trajectory)
            results = await scorer.score(trajectory.position, request, time.monotonic(), trajectory.peers)
            trajectory.results = dict(results)

        await run_all([score(each) for each in playable])
    group = Group(0, prompt, trajectories)
    score_group(group, specs, spec.agent.reward_weight)
    write_file(trajectory_file(environment.run_dir, 0, plan.lane), plan.lane, 0, [group], template.decode)


def leave_out_torch(model: Model) -> None:
    """Let transformers find no torch: tokenizers do not need it, and its import takes longer than the rest of the
    rehearsal. Code of the model's repository may need it."""
    if not model.trust_remote_code:
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is none
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def main() -> int:
    configure_logging()
    try:
        environment = read_environment(dict(os.environ))
        leave_out_torch(environment.job.spec.model)
        asyncio.run(rehearse(environment, read_settings(Path(sys.argv[1]))))
    except RLJobError as error:
        return end_program(str(error), ExitCode.USER)
    return ExitCode.SUCCEEDED
