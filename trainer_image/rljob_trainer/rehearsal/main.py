"""The program of a rehearsal: plays one episode on the first row with given answers, scores it, and writes it to the
trajectory log.

The agent loop, the services and the rewards are those of training, with the environment of the head; the policy's
answers are tokenized as the model would have sampled them, and then used up. Invariants: without an error, the log has
one file, of step 0 and the lane eval, with one row; an episode that asks for more answers than there are ends after the
last given one, with all replies to it.
"""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.errors import RLJobError, UserError
from rljob_api.manifest.agent import Agent
from rljob_api.manifest.job_sections import Data, Model
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.run.folder import trajectory_file
from rljob_api.wire.contract import ExitCode
from rljob_api.wire.logs import configure_logging
from rljob_api.wire.termination import end_program
from rljob_inputs.data.prompts import build_prompts
from rljob_inputs.data.rows import read_rows
from rljob_inputs.hub import HubAccess
from rljob_inputs.models.own_settings import load_model_settings
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask
from rljob_trainer.algorithms.rows import score_group
from rljob_trainer.calls.client import AgentServices
from rljob_trainer.concurrency import run_all
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.driver.collection import CollectionPlan
from rljob_trainer.episodes.types import Completion, Episode, EpisodeEnd, Group, has_own_reward
from rljob_trainer.gateway.forwarding import watch_models
from rljob_trainer.head.agent import start_agent
from rljob_trainer.head.environment import Environment, read_environment
from rljob_trainer.head.inputs import load_tokenizer
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.trajectory_log import write_file
from rljob_trainer.outages import Outages
from rljob_trainer.replicas.http import open_session
from rljob_trainer.rewards.groups import RequestBuilder, RewardClients

log = logging.getLogger(__name__)

GENERATION = "given"
"""In place of the weights' generation."""


def find_end_id(template: ChatTemplate, tokenizer: Any) -> int | None:
    """Return the token with which the model would end an answer: the template's, which for some models is not the
    tokenizer's end-of-sequence token (Gemma 3, and base models with a template)."""
    return tokenizer.eos_token_id if template.end_token is None else template.end_token


def build_completion(
    text: str, template: ChatTemplate, end_id: int | None, max_tokens: int, stop: Sequence[str] = ()
) -> Completion:
    """Return the text as a completion. Like the model's, it ends with the end token, before a stop string whose tokens
    it has, or at the limit."""
    end = min((each for each in stop if each in text), key=text.index, default="")
    text = text[: text.index(end)] if end else text
    token_ids = [*template.encode(f"{text}{end}"), *([] if end or end_id is None else [end_id])]
    truncated = len(token_ids) > max_tokens
    if truncated:
        token_ids = token_ids[:max_tokens]
        text = template.decode(token_ids)
    count = len(token_ids)
    return Completion(token_ids, [0.0] * count, [0] * count, text, truncated, GENERATION)


@dataclass
class GivenAnswers:
    """Implements agents.base.Generate."""

    answers: Sequence[str]
    template: ChatTemplate
    end_id: int | None
    max_tokens: int
    stop: Sequence[str] = ()
    """The job's stop strings."""
    num_used: int = 0
    is_used_up: bool = False

    async def __call__(
        self, token_ids: list[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        if self.num_used == len(self.answers):
            # A cut-off answer ends the episode after everything that follows from the last given one.
            self.is_used_up = True
            return Completion([], [], [], "", True, GENERATION)
        text = self.answers[self.num_used]
        self.num_used += 1
        limit = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        return build_completion(text, self.template, self.end_id, limit, [*self.stop, *stop])


def limit_turns(agent: Agent, num_answers: int) -> Agent:
    """Return the agent with the limit at which the gateway refuses a program that continues after the empty answer."""
    if not agent.is_hosted:
        return agent
    return agent.model_copy(update={"max_assistant_turns": min(agent.turn_limit, num_answers + 1)})


def end_after_given_answers(episode: Episode) -> None:
    """Remove the empty answer that ended the episode. What the model would have seen before it stays.

    A program gets an answer without text, and after it none. If it fails then, the given answers are the cause and not
    the program: the episode counts as one that was ended.
    """
    if episode.turns and episode.turns[-1].truncated and not episode.turns[-1].text:
        episode.turns.pop()
        episode.messages = episode.messages[:-1]
    if episode.failure is not None and episode.failure.service == RUNNER_SERVICE:
        episode.failure = None
    if episode.failure is None:
        episode.end = EpisodeEnd.MAX_TURNS


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
        names = {each.name for each in specs if each.scores_row(prompt.extra_info, prompt.data_source)}
        scorer = rewards.open_group(plan.group_id(0), plan.lane, 1, names)
        has_teacher = any(reward.teacher for reward in specs)
        requests = RequestBuilder(tokenizer, spec.agent.completion, spec.schedule.steps, has_teacher)
        playable = [each for each in trajectories if each.failure is None and (specs or has_own_reward(each))]
        scorer.expect(len(playable))

        async def score(trajectory: Episode) -> None:
            request = requests.build(plan.trajectory_id(trajectory), plan.lane, prompt, trajectory)
            trajectory.results = await scorer.score(trajectory.position, request, time.monotonic(), trajectory.peers)

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
