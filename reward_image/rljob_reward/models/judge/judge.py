"""A judge: combines template, parser, votes, rate limits and the model's server.

A sample is one question. A group (compare) is many questions, each with its own wait for limits and its own timeout.
Invariant: the tokens of an execution are settled exactly once, and the endpoint's key is sent only to the endpoint.
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
from rljob_reward.models import vllm_sidecar
from rljob_reward.models.execution import ExecutionProgress, NoScoreError, Score
from rljob_reward.models.judge.comparing import (
    TEMPLATE_FIELDS,
    Compare,
    ComparisonQuestion,
    Scores,
    combine_votes,
    plan_questions,
    read_answer,
    score_samples,
)
from rljob_reward.models.judge.endpoint_limiter import EndpointRateLimiter
from rljob_reward.models.judge.parser import Parser, combine
from rljob_reward.models.judge.question_queue import QuestionQueue
from rljob_reward.models.judge.replicas import ReplicaCounter
from rljob_reward.models.judge.template import QuestionTemplate, common_fields_of, fields_of
from rljob_reward.models.judge.voting import Voting
from rljob_reward.models.metrics import UpstreamMetrics
from rljob_reward.models.rate_limiter import RateLimiter, UnlimitedRateLimiter
from rljob_reward.models.upstream import UpstreamClient
from rljob_reward.models.vllm_sidecar import VllmSidecar
from rljob_reward.results import StartupReport

_PATH = "/chat/completions"
_EXPECTED_PROMPT_TOKENS = 1000
"""Estimate until actual numbers are known."""
_WARM_UP_SECONDS = 600.0


class Judge:
    """A chat model that judges, on the vLLM sidecar or at an endpoint."""

    def __init__(
        self, judge: JudgeReward, slots: int, replicas: int, timeout_seconds: float, metrics: UpstreamMetrics
    ) -> None:
        """Raises UserError if the template or the parser is invalid, or if the key or vLLM's socket is missing."""
        self._judge = judge
        self._metrics = metrics
        self._timeout_seconds = timeout_seconds
        completions = TEMPLATE_FIELDS[judge.compare] if judge.compare else ("completion",)
        self._template = QuestionTemplate(judge.template, judge.system_prompt, completions)
        self._parser = Parser(judge)
        limits = judge.endpoint.limits if judge.endpoint else EndpointLimits()
        tokens_per_vote = _EXPECTED_PROMPT_TOKENS + judge.sampling.max_tokens
        self._limiter = EndpointRateLimiter(limits, judge.votes, float(judge.votes * tokens_per_vote))
        self._queue = QuestionQueue(self._limiter, slots, timeout_seconds, metrics.record_wait)
        # With compare, each question waits in the queue.
        self.limiter: RateLimiter = UnlimitedRateLimiter() if judge.compare else self._limiter
        self._replicas = ReplicaCounter(replicas, self._set_replicas) if limits != EndpointLimits() else None
        key = _take_key(judge.endpoint) if judge.endpoint else ""
        self._sidecar = None if judge.endpoint else VllmSidecar()
        self._session = self._sidecar.session if self._sidecar else vllm_sidecar.open_session()
        base, name = (judge.endpoint.url, "endpoint") if judge.endpoint else (f"{vllm_sidecar.URL}/v1", "vLLM")
        upstream = UpstreamClient(
            self._session, base.rstrip("/") + _PATH, self._limiter, metrics, secret=key, name=f"the judge's {name}"
        )
        self._voting = Voting(judge, self._parser.response_format, upstream, metrics)

    @property
    def can_serve(self) -> bool:
        return self._sidecar is None or self._sidecar.is_up

    @property
    def enforces_timeout(self) -> bool:
        return self._judge.compare is not None

    async def start(self) -> StartupReport:
        if self._replicas is not None:
            await self._replicas.start()
        if self._sidecar is not None:
            await self._sidecar.wait_until_ready()
            await self._warm_up()
        return StartupReport(entrypoint=self._voting.model, signature="judge")

    async def _warm_up(self) -> None:
        """Trigger vLLM's lazy initialization, and check that the model accepts chat requests (has a template)."""
        try:
            await self._voting.warm_up(ExecutionProgress(time.monotonic() + _WARM_UP_SECONDS))
        except NoScoreError as error:
            raise UserError(f"judge.model: the warm-up request failed: {error}") from error

    async def score(self, body: bytes, progress: ExecutionProgress) -> Sequence[Score | NoScoreError]:
        if self._judge.compare is not None:
            return await self._compare(GroupRequest.model_validate_json(body), self._judge.compare)
        request = ScoreRequest.model_validate_json(body)
        messages = self._template.build_messages(fields_of(request) | {"completion": request.completion})
        return [combine(await self._voting.ask(messages, self._parser.read, progress), self._judge.aggregate)]

    async def _compare(self, group: GroupRequest, compare: Compare) -> Scores:
        questions = plan_questions(compare, [sample.completion for sample in group.samples])
        fields = common_fields_of(group.samples)
        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(self._ask(question, fields, compare)) for question in questions]
        except ExceptionGroup as bugs:
            raise bugs.exceptions[0] from None
        return score_samples(len(group.samples), questions, [answer.result() for answer in answers])

    async def _ask(self, question: ComparisonQuestion, fields: dict[str, Any], compare: Compare) -> Scores:
        """Return a score for each sample of the question."""
        num_samples = len(question.samples)

        def read(answer: str) -> Scores:
            return read_answer(compare, self._parser, answer, num_samples)

        async with self._queue.acquire() as progress:
            try:
                messages = self._template.build_messages(fields | question.fields)
                async with asyncio.timeout(progress.seconds_left):
                    votes = await self._voting.ask(messages, read, progress)
                return combine_votes(votes, self._judge.aggregate, num_samples)
            except NoScoreError as error:
                return [error] * num_samples
            except TimeoutError:
                message = f"a question took longer than {self._timeout_seconds:g} s (timeoutSeconds)"
                late = NoScoreError(InvalidReason.TIMEOUT, f"{message}; it was {progress.activity}")
                return [late] * num_samples

    async def close(self) -> None:
        if self._replicas is not None:
            await self._replicas.close()
        if self._sidecar is not None:
            await self._sidecar.close()
        await self._session.close()

    def _set_replicas(self, number: int) -> None:
        self._limiter.set_replicas(number)
        self._metrics.record_replicas(number)


def _take_key(endpoint: JudgeEndpoint) -> str:
    """Remove the key from the environment, so that child processes and dumps do not contain it."""
    key = os.environ.pop(ENV_JUDGE_API_KEY, "").strip()
    reference = endpoint.api_key_secret_ref
    if reference and not key:
        raise UserError(f"${ENV_JUDGE_API_KEY} is not set: Secret {reference.name} has no key {reference.key}")
    return key
