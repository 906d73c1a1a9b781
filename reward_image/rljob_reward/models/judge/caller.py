"""A judge: question, votes, answers, score. Puts template, parser, limits and the model's server together.

A sample is one question. A group (compare) is many: each waits for the limits in its turn and has a time of its own.

Invariant: an execution's tokens are settled once, however it ends; the endpoint's key reaches its requests alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.scorers import EndpointLimits, JudgeEndpoint, JudgeReward
from rljob_api.wire.contract import ENV_JUDGE_API_KEY
from rljob_api.wire.protocol import GroupRequest, InvalidReason, ScoreRequest
from rljob_reward.models import vllm_sidecar as beside
from rljob_reward.models.judge.comparing import (
    NAMES,
    Ask,
    Compare,
    Scores,
    combine_votes,
    plan_questions,
    read_answer,
    score_samples,
)
from rljob_reward.models.judge.parser import Parser, combine
from rljob_reward.models.judge.peers import Peers
from rljob_reward.models.judge.question_queue import Turns
from rljob_reward.models.judge.rate_limiter import LimitGate
from rljob_reward.models.judge.shares import Share
from rljob_reward.models.judge.template import Question, common_fields_of, fields_of
from rljob_reward.models.judge.voting import Voting
from rljob_reward.models.metrics import CallMetrics
from rljob_reward.models.model_slots import Gate, NoScoreError, OpenGate, Progress, Score
from rljob_reward.models.upstream import Asker
from rljob_reward.models.vllm_sidecar import Beside
from rljob_reward.results import StartupReport

_PATH = "/chat/completions"
_FIRST_PROMPT_TOKENS = 1000
"""What a question is thought to have until some have been counted."""
_WARM_UP_SECONDS = 600.0


class JudgeCaller:
    """Asks the judge."""

    def __init__(self, judge: JudgeReward, slots: int, timeout_seconds: float, metrics: CallMetrics) -> None:
        """UserError: its template or parser is wrong, or what it needs is not there."""
        self._judge = judge
        self._metrics = metrics
        self._timeout_seconds = timeout_seconds
        self._question = Question(judge.template, judge.system_prompt, NAMES.get(judge.compare or "", ("completion",)))
        self._parser = Parser(judge)
        limits = judge.endpoint.limits if judge.endpoint else EndpointLimits()
        each = _FIRST_PROMPT_TOKENS + judge.sampling.max_tokens
        self._limits = LimitGate(limits, judge.votes, float(judge.votes * each))
        self._turns = Turns(self._limits, slots, timeout_seconds, self.record_wait)
        self.gate: Gate = OpenGate() if judge.compare else self._limits
        self._peers = Peers(timeout_seconds, self._take_share) if limits != EndpointLimits() else None
        key = _take_key(judge.endpoint) if judge.endpoint else ""
        self._beside = None if judge.endpoint else Beside()
        self._session = self._beside.session if self._beside else beside.open_session()
        base, name = (judge.endpoint.url, "endpoint") if judge.endpoint else (f"{beside.URL}/v1", "vLLM")
        asker = Asker(self._session, base.rstrip("/") + _PATH, self, secret=key, name=f"the judge's {name}")
        self._voting = Voting(judge, self._parser.response_format, asker, metrics)

    @property
    def can_serve(self) -> bool:
        return self._beside is None or self._beside.is_up

    @property
    def enforces_timeout(self) -> bool:
        return self._judge.compare is not None

    async def start(self) -> StartupReport:
        if self._peers is not None:
            self._peers.start()
        if self._beside is not None:
            await self._beside.wait()
            await self._warm_up()
        return StartupReport(entrypoint=self._voting.model, signature="judge")

    async def _warm_up(self) -> None:
        """The first request pays for what is set up lazily; and a model that refuses such requests (it has no chat
        template) refuses every one."""
        try:
            await self._voting.warm_up(Progress(time.monotonic() + _WARM_UP_SECONDS))
        except NoScoreError as error:
            raise UserError(f"judge.model cannot be asked: {error}") from error

    async def call(self, body: bytes, progress: Progress) -> Sequence[Score | NoScoreError]:
        if self._judge.compare is not None:
            return await self._compare(GroupRequest.model_validate_json(body), self._judge.compare)
        request = ScoreRequest.model_validate_json(body)
        messages = self._question.build_messages(fields_of(request) | {"completion": request.completion})
        return [combine(await self._voting.ask(messages, self._parser.read, progress), self._judge.aggregate)]

    async def _compare(self, group: GroupRequest, compare: Compare) -> Scores:
        questions = plan_questions(compare, [sample.completion for sample in group.samples])
        fields = common_fields_of(group.samples)
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._ask(question, fields, compare)) for question in questions]
        except ExceptionGroup as bugs:
            raise bugs.exceptions[0] from None
        return score_samples(len(group.samples), questions, [task.result() for task in asked])

    async def _ask(self, question: Ask, fields: dict[str, Any], compare: Compare) -> Scores:
        """The scores of the samples that a question is about."""
        num_samples = len(question.about)

        def read(answer: str) -> Scores:
            return read_answer(compare, self._parser, answer, num_samples)

        async with self._turns.take() as progress:
            try:
                messages = self._question.build_messages(fields | question.fields)
                async with asyncio.timeout(progress.seconds_left):
                    votes = await self._voting.ask(messages, read, progress)
                return combine_votes(votes, self._judge.aggregate, num_samples)
            except NoScoreError as error:
                return [error] * num_samples
            except TimeoutError:
                message = f"a question took longer than {self._timeout_seconds:g} s (timeoutSeconds)"
                late = NoScoreError(InvalidReason.TIMEOUT, f"{message}; it was {progress.now}")
                return [late] * num_samples

    async def close(self) -> None:
        if self._peers is not None:
            await self._peers.close()
        if self._beside is not None:
            await self._beside.close()
        await self._session.close()

    def _take_share(self, share: Share | None) -> None:
        self._limits.set_share(share)
        self._metrics.record_peers(share.count if share else 0)

    def record_wait(self, limit: str, seconds: float) -> None:
        self._metrics.record_wait(limit, seconds)

    def record_call(self, outcome: str) -> None:
        self._metrics.record_call(outcome)

    def pause(self, seconds: float) -> None:
        self._limits.pause(seconds)

    async def enter_again(self) -> None:
        await self._limits.enter_again()


def _take_key(endpoint: JudgeEndpoint) -> str:
    """The key, out of the environment: whatever dumps or inherits that has no business with it."""
    key = os.environ.pop(ENV_JUDGE_API_KEY, "").strip()
    reference = endpoint.api_key_secret_ref
    if reference and not key:
        raise UserError(f"${ENV_JUDGE_API_KEY} is not set: Secret {reference.name} has nothing under {reference.key}")
    return key
