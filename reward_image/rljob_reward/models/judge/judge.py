"""A judge: combines template, parser, votes, rate limits and the model's server.

A sample is one question. A group (compare) is many questions, each with its own wait for limits and its own timeout.
Invariant: the tokens of an execution are settled exactly once, and the endpoint's key is sent only to the endpoint.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.scorers import EndpointLimits, JudgeEndpoint, JudgeReward
from rljob_api.wire.contract import ENV_JUDGE_API_KEY
from rljob_api.wire.protocol import GroupRequest, InvalidReason, ScoreRequest
from rljob_reward.models import vllm_sidecar
from rljob_reward.models.backend import ModelBackend
from rljob_reward.models.execution import ExecutionProgress, NoScoreError, Score
from rljob_reward.models.judge import comparing
from rljob_reward.models.judge.comparing import Compare, ComparisonQuestion, Scores
from rljob_reward.models.judge.parser import Parser, combine
from rljob_reward.models.judge.question_queue import QuestionQueue
from rljob_reward.models.judge.replicas import ReplicaCounter
from rljob_reward.models.judge.template import QuestionTemplate, common_fields_of, fields_of
from rljob_reward.models.judge.voting import Voting
from rljob_reward.models.metrics import UpstreamMetrics
from rljob_reward.models.rate_limiter import RateLimiter
from rljob_reward.models.upstream import UpstreamClient
from rljob_reward.results import StartupReport

_PATH = "/chat/completions"
_EXPECTED_PROMPT_TOKENS = 1000
"""Estimate until actual numbers are known."""


class Judge(ModelBackend):
    """A chat model that judges, on the vLLM sidecar or at an endpoint."""

    def __init__(
        self, judge: JudgeReward, slots: int, replicas: int, timeout_seconds: float, metrics: UpstreamMetrics
    ) -> None:
        """Raises UserError if the template or the parser is invalid, or if the key or vLLM's socket is missing."""
        completions = comparing.TEMPLATE_FIELDS[judge.compare] if judge.compare else ("completion",)
        self._template = QuestionTemplate(judge.template, judge.system_prompt, completions)
        self._parser = Parser(judge)
        key = _take_key(judge.endpoint) if judge.endpoint else ""
        limits = judge.endpoint.limits if judge.endpoint else EndpointLimits()
        tokens_per_vote = _EXPECTED_PROMPT_TOKENS + judge.sampling.max_tokens
        limiter = RateLimiter(limits, judge.votes, float(judge.votes * tokens_per_vote))
        # With compare, each question waits in the queue.
        super().__init__(RateLimiter() if judge.compare else limiter, uses_sidecar=judge.endpoint is None)
        self.enforces_timeout = judge.compare is not None
        self._judge = judge
        self._metrics = metrics
        self._timeout_seconds = timeout_seconds
        self._question_limiter = limiter
        metrics.watch_pause(lambda: limiter.pause_seconds)
        self._queue = QuestionQueue(limiter, slots, timeout_seconds, metrics.record_wait)
        self._replicas = ReplicaCounter(replicas, self._set_replicas) if limits != EndpointLimits() else None
        base, name = (judge.endpoint.url, "endpoint") if judge.endpoint else (f"{vllm_sidecar.URL}/v1", "vLLM")
        upstream = UpstreamClient(
            self._session, base.rstrip("/") + _PATH, limiter, metrics, secret=key, name=f"the judge's {name}"
        )
        self._voting = Voting(judge, self._parser.response_format, upstream, metrics)

    @property
    def pause_seconds(self) -> float:
        return self._question_limiter.pause_seconds

    async def start(self) -> StartupReport:
        if self._replicas is not None:
            await self._replicas.start()
        if self._sidecar is not None:
            await self._warm_up(self._voting.warm_up, "judge.model")
        return StartupReport(entrypoint=self._voting.model, signature="judge")

    async def score(self, body: bytes, progress: ExecutionProgress) -> Sequence[Score | NoScoreError]:
        if self._judge.compare is not None:
            return await self._compare(GroupRequest.model_validate_json(body), self._judge.compare)
        request = ScoreRequest.model_validate_json(body)
        messages = self._template.build_messages(fields_of(request) | {"completion": request.completion})
        return [combine(await self._voting.ask(messages, self._parser.read, progress), self._judge.aggregate)]

    async def _compare(self, group: GroupRequest, compare: Compare) -> Scores:
        questions = comparing.plan_questions(compare, [sample.completion for sample in group.samples])
        fields = common_fields_of(group.samples)
        answers = await asyncio.gather(*(self._ask(question, fields, compare) for question in questions))
        return comparing.score_samples(len(group.samples), questions, answers)

    async def _ask(self, question: ComparisonQuestion, fields: dict[str, Any], compare: Compare) -> Scores:
        num_samples = len(question.samples)

        def read(answer: str) -> Scores:
            return comparing.read_answer(compare, self._parser, answer, num_samples)

        async with self._queue.acquire() as progress:
            try:
                messages = self._template.build_messages(fields | question.fields)
                async with asyncio.timeout(progress.seconds_left):
                    votes = await self._voting.ask(messages, read, progress)
                return comparing.combine_votes(votes, self._judge.aggregate, num_samples)
            except NoScoreError as error:
                return [error] * num_samples
            except TimeoutError:
                message = f"a question took longer than {self._timeout_seconds:g} s (timeoutSeconds)"
                late = NoScoreError(InvalidReason.TIMEOUT, f"{message}; it was {progress.activity}")
                return [late] * num_samples

    async def close(self) -> None:
        if self._replicas is not None:
            self._replicas.close()
        await super().close()

    def _set_replicas(self, number: int) -> None:
        self._question_limiter.set_replicas(number)
        self._metrics.record_replicas(number)


def _take_key(endpoint: JudgeEndpoint) -> str:
    """Remove the key from the environment, so that child processes and dumps do not contain it."""
    key = os.environ.pop(ENV_JUDGE_API_KEY, "").strip()
    reference = endpoint.api_key_secret_ref
    if reference and not key:
        raise UserError(f"${ENV_JUDGE_API_KEY} is not set: Secret {reference.name} has no key {reference.key}")
    return key
