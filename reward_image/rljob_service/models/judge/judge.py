"""A judge: combines template, parser, votes, rate limits and the model's server.

A sample is one question, sent as many times as there are votes. A group (compare) is many questions, each with its own
wait for limits and its own timeout. Invariants: the tokens of an execution are settled exactly once; a failed vote is a
value, so that it does not affect the others.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rljob_api.errors import RLJobError
from rljob_api.manifest.services.models import JudgeReward
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import GroupRequest, ScoreRequest
from rljob_service.models.chat import ChatBackend, ChatSettings
from rljob_service.models.execution import ExecutionProgress, NoScoreError, Score
from rljob_service.models.judge import comparing
from rljob_service.models.judge.comparing import Compare, ComparisonQuestion, Scores
from rljob_service.models.judge.parser import Parser, combine, value_or_error
from rljob_service.models.judge.question_queue import QuestionQueue
from rljob_service.models.metrics import UpstreamMetrics
from rljob_service.models.templates import Template, fields_of
from rljob_service.models.texts import completion_text
from rljob_service.results import StartupReport

T = TypeVar("T")

_FIELDS = ("prompt", "messages", "ground_truth", "data_source", "extra_info")


class Judge(ChatBackend):
    """A chat model that judges, on the vLLM sidecar or at an endpoint."""

    def __init__(
        self,
        judge: JudgeReward,
        slots: int,
        replicas: int,
        timeout_seconds: float,
        metrics: UpstreamMetrics,
        on_fatal_error: Callable[[RLJobError], None],
    ) -> None:
        """Raises UserError if the template or the parser is invalid, or if the key or vLLM's socket is missing."""
        completions = comparing.TEMPLATE_FIELDS[judge.compare] if judge.compare else ("completion",)
        self._template = Template("judge.template", judge.template, (*_FIELDS[:2], *completions, *_FIELDS[2:]))
        self._parser = Parser(judge)
        response_format = self._parser.response_format
        settings = ChatSettings(
            who="judge",
            path="judge",
            model=judge.model,
            endpoint=judge.endpoint,
            sampling=judge.sampling,
            num_requests=judge.votes,
            system_prompt=judge.system_prompt,
            payload={} if response_format is None else {"response_format": response_format},
        )
        # With compare, each question waits in the queue.
        super().__init__(settings, replicas, metrics, on_fatal_error, limits_executions=judge.compare is None)
        self.enforces_timeout = judge.compare is not None
        self._judge = judge
        self._timeout_seconds = timeout_seconds
        self._queue = QuestionQueue(self.chat_limiter, slots, timeout_seconds, metrics.record_wait)

    async def start(self) -> StartupReport:
        return (await super().start()).model_copy(update={"reads": ["whole"]})

    async def execute(self, body: bytes, progress: ExecutionProgress) -> Sequence[Score | NoScoreError]:
        if self._judge.compare is not None:
            return await self._compare(GroupRequest.model_validate_json(body), self._judge.compare)
        request = ScoreRequest.model_validate_json(body)
        fields = fields_of(request) | {"completion": completion_text(request)}
        return [combine(await self._vote(fields, self._parser.read, progress), self._judge.aggregate)]

    async def _compare(self, group: GroupRequest, compare: Compare) -> Scores:
        questions = comparing.plan_questions(compare, [completion_text(sample) for sample in group.samples])
        fields = common_fields_of(group.samples)
        answers = await asyncio.gather(*(self._ask(question, fields, compare) for question in questions))
        return comparing.score_samples(len(group.samples), questions, answers)

    async def _ask(self, question: ComparisonQuestion, fields: dict[str, Any], compare: Compare) -> Scores:
        num_samples = len(question.samples)

        def read(answer: str) -> Scores:
            return comparing.read_answer(compare, self._parser, answer, num_samples)

        async with self._queue.acquire() as progress:
            try:
                async with asyncio.timeout(progress.seconds_left):
                    votes = await self._vote(fields | question.fields, read, progress)
                return comparing.combine_votes(votes, self._judge.aggregate, num_samples)
            except NoScoreError as error:
                return [error] * num_samples
            except TimeoutError:
                message = f"a question took longer than {self._timeout_seconds:g} s (timeoutSeconds)"
                was_away = self.upstream.was_away(progress.started_at)
                reason = InvalidReason.UNREACHABLE if was_away else InvalidReason.TIMEOUT
                self.upstream.suspect()
                late = NoScoreError(reason, f"{message}; it was {progress.activity}")
                return [late] * num_samples

    async def _vote(
        self, fields: dict[str, Any], read: Callable[[str], T], progress: ExecutionProgress
    ) -> list[T | NoScoreError]:
        """Ask the question of these fields, and return the votes that `read` finds in the answers. Raises NoScoreError
        if the template fails on them."""
        messages = [*self.system_messages, {"role": "user", "content": self._template.render(fields)}]
        answers = await asyncio.gather(*(self.ask(messages, progress) for _ in range(self._judge.votes)))
        tokens = [answer.tokens for answer in answers if answer.tokens is not None]
        if len(tokens) == len(answers):
            progress.used = sum(tokens)
        texts = [answer.text for answer in answers]
        return [text if isinstance(text, NoScoreError) else value_or_error(read, text) for text in texts]


def common_fields_of(requests: Sequence[ScoreRequest]) -> dict[str, Any]:
    """Return the variables of a group: its prompt, and the entries of extra_info that all samples share."""
    first, *others = requests
    shared = {
        name: value
        for name, value in first.extra_info.items()
        if all(name in other.extra_info and other.extra_info[name] == value for other in others)
    }
    return fields_of(first) | {"extra_info": shared}
