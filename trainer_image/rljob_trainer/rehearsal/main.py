"""The program of a rehearsal: plays one episode on the first row, scores it, and writes it to the trajectory log.

The agent loop, the services and the rewards are those of training, with the environment of the head. Invariant: without
an error, the log has one file, of step 0 and the lane eval, with one row.
"""

from __future__ import annotations

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
from rljob_api.manifest.job_sections import Model
from rljob_api.wire.contract import ExitCode
from rljob_api.wire.termination import end_program
from rljob_inputs.data.prompts import build_prompts
from rljob_inputs.data.rows import read_rows
from rljob_inputs.hub.repository import HubAccess
from rljob_inputs.models.config import find_context_length
from rljob_inputs.models.files import read_config
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask
from rljob_trainer.calls.services import AgentServices
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.driver.collection import build_request
from rljob_trainer.driver.evaluation import plan_evaluation
from rljob_trainer.episodes.batches import weighted_score
from rljob_trainer.episodes.types import Group, has_own_reward
from rljob_trainer.head.agent import start_agent
from rljob_trainer.head.environment import Environment, read_environment
from rljob_trainer.head.tokenizer import load_tokenizer
from rljob_trainer.history.run_state import trajectory_file
from rljob_trainer.history.trajectory_log import write_file
from rljob_trainer.rehearsal.given_answers import GENERATION, GivenAnswers, end_after_given_answers, limit_turns
from rljob_trainer.replicas.http import open_session
from rljob_trainer.rewards.clients import RewardClients

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What the command passes, as JSON."""

    answers: list[str]
    rewards: list[str]
    """Names of those that are served."""


def read_settings(path: Path) -> Settings:
    return Settings(**json.loads(path.read_text(encoding="utf-8")))


def read_first_prompt(environment: Environment, tokenizer: Any) -> Prompt:
    data = environment.job.spec.data
    access = HubAccess.from_environment(os.environ)
    rows = read_rows(data.train, environment.train_data, split="train", access=access)
    prompt = next(build_prompts(data, data.train, rows, tokenizer, split="train"), None)
    if prompt is None:
        raise UserError(f"spec.data.train.source: {environment.train_data} has no rows")
    return prompt


def find_room(environment: Environment) -> int | None:
    """Return the longest prompt with its answer, in tokens; None: not known."""
    spec = environment.job.spec
    access = HubAccess.from_environment(os.environ)
    limit = spec.rollout.max_model_len
    return limit or find_context_length(read_config(environment.model, spec.model.revision, access))


async def rehearse(environment: Environment, settings: Settings) -> None:
    spec = environment.job.spec
    tokenizer = load_tokenizer(environment.model, environment.job.spec.model)
    template = ChatTemplate(tokenizer, spec.agent.tool_format)  # raises before any server is started
    prompt = read_first_prompt(environment, tokenizer)
    specs = [reward for reward in spec.rewards if reward.name in settings.rewards]
    plan = plan_evaluation(spec, 0, GENERATION)
    answers = GivenAnswers(settings.answers, template, tokenizer.eos_token_id, plan.sampling.max_tokens)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        services, rewards = AgentServices(spec.services, session), RewardClients(specs, session)
        for client in (services, rewards):
            await client.start()
            stack.push_async_callback(client.close)
        limited = spec.model_copy(update={"agent": limit_turns(spec.agent, len(settings.answers))})
        room = find_room(environment)
        agent = await start_agent(stack, limited, tokenizer, room, services, environment.address)
        seed = plan.sample_seed(prompt.index, 0, 0)
        episode = await agent.loop.run(EpisodeTask(plan.episode_id(0, 0), plan.lane, prompt, 0, 0, answers, seed))
        if answers.is_used_up:
            end_after_given_answers(episode)
        if episode.failure is None and (specs or has_own_reward(episode)):
            rewards.begin()
            scorer = rewards.open_group(plan.group_id(0), plan.lane, 1)
            episode.results = dict(await scorer.score(0, build_request(prompt, episode, plan), time.monotonic()))
            episode.score = weighted_score(episode, specs, spec.agent.reward_weight)
    group = Group(0, prompt, [episode])
    write_file(trajectory_file(environment.run_dir, 0, plan.lane), plan.lane, 0, [group], template.decode)


def leave_out_torch(model: Model) -> None:
    """Let transformers find no torch: tokenizers do not need it, and its import takes longer than the rest of the
    rehearsal. Code of the model's repository may need it."""
    if not model.trust_remote_code:
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is none
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        environment = read_environment(dict(os.environ))
        leave_out_torch(environment.job.spec.model)
        asyncio.run(rehearse(environment, read_settings(Path(sys.argv[1]))))
    except RLJobError as error:
        return end_program(str(error), ExitCode.USER)
    return ExitCode.SUCCEEDED
