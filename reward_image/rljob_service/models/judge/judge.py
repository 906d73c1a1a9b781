"""A judge: combines template, parser, votes, rate limits and the model's server.

A sample is one question, sent as many times as there are votes. A group (compare) is many questions, each with its own
wait for limits and its own timeout. Invariants: the tokens of an execution are settled exactly once; a failed vote is a
value, so that it does not affect the others.

Questions of all groups start in order of arrival, as limits and slots allow. Their queue waits for a free slot and for
the rate limiter (a timer, because it sends no events); unblocked by a finished question or by that timer. Invariants:
waiting does not count towards timeouts, and a question is admitted alone, regardless of the size of its group.

In a group, an answer gives a score to each sample of its question. pairwise asks about each pair in both orders, so
that a preference for the first place cancels out; ranking and listwise ask once about all samples. Invariant: an
unreadable answer makes only its samples invalid, and never counts as zero.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import permutations
from typing import Any, Literal, NamedTuple, TypeVar

from rljob_api.errors import RLJobError
from rljob_api.manifest.services.models import JudgeReward
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import GroupRequest, ScoreRequest
from rljob_service.models.chat import ChatBackend, ChatSettings
from rljob_service.models.execution import ExecutionProgress, NoScoreError, Score
from rljob_service.models.judge.parser import (
    Parser,
    combine,
    mean_components,
    mean_value,
    require_majority,
    unreadable,
    value_or_error,
)
from rljob_service.models.metrics import UpstreamMetrics
from rljob_service.models.rate_limiter import RateLimiter
from rljob_service.models.templates import Template, fields_of
from rljob_service.models.texts import completion_text
from rljob_service.results import StartupReport

Compare = Literal["pairwise", "ranking", "listwise"]
Scores = list[Score | NoScoreError]
"""One per sample of the question or group."""

SINGLE_SAMPLE_SCORE = 0.5
"""Score of the only sample of a group: the mean of every group, and a tie with itself."""

TEMPLATE_FIELDS: dict[Compare, tuple[str, ...]] = {
    "pairwise": ("first", "second"),
    "ranking": ("completions",),
    "listwise": ("completions",),
}
"""Variables of the template, instead of `completion`."""


class ComparisonQuestion(NamedTuple):
    """One question about some samples of a group."""

    samples: tuple[int, ...]
    """Indices of the samples, in the order of the question."""
    fields: dict[str, Any]
    """Values of TEMPLATE_FIELDS."""


def plan_questions(compare: Compare, completions: Sequence[str]) -> list[ComparisonQuestion]:
    """Return all questions; none if there is nothing to compare."""
    indices = range(len(completions))
    if compare == "listwise" or (compare == "ranking" and len(completions) > 1):
        return [ComparisonQuestion(tuple(indices), {"completions": list(completions)})]
    if compare == "ranking":
        return []
    pairs = permutations(indices, 2)
    return [ComparisonQuestion((i, j), {"first": completions[i], "second": completions[j]}) for i, j in pairs]


def read_answer(compare: Compare, parser: Parser, answer: str, num_samples: int) -> Scores:
    """Return the scores of the question's samples. Raises NoScoreError if the whole answer is unreadable."""
    if compare == "pairwise":
        return _read_pair(parser.read(answer), answer)
    values, components = parser.read_list(answer)
    if len(values) != num_samples:
        raise unreadable(f"the judge's list has {len(values)} elements for {num_samples} completions", answer)
    if compare == "ranking":
        return _read_ranking([parser.to_number(value, answer) for value in values], components, answer)
    numbers = [value_or_error(parser.to_number, value, answer) for value in values]
    return [number if isinstance(number, NoScoreError) else Score(number, components) for number in numbers]


def combine_votes(votes: Sequence[Scores | NoScoreError], aggregate: str, num_samples: int) -> Scores:
    return [
        value_or_error(combine, [vote if isinstance(vote, NoScoreError) else vote[i] for vote in votes], aggregate)
        for i in range(num_samples)
    ]


def score_samples(num_samples: int, questions: Sequence[ComparisonQuestion], answers: Sequence[Scores]) -> Scores:
    """Return the mean of each sample's comparisons. More than half of them must have an answer."""
    found: list[Scores] = [[] for _ in range(num_samples)]
    for question, answer in zip(questions, answers, strict=True):
        for index, score in zip(question.samples, answer, strict=True):
            found[index].append(score)
    return [value_or_error(_mean_of, scores) if scores else Score(SINGLE_SAMPLE_SCORE) for scores in found]


def _mean_of(comparisons: Scores) -> Score:
    scores = require_majority(comparisons, "comparisons")
    if len(comparisons) == 1:
        return scores[0]
    return Score(mean_value(scores), mean_components(scores) | {"comparisons": float(len(scores))})


def _read_pair(score: Score, answer: str) -> Scores:
    if not 0 <= score.value <= 1:
        raise unreadable(
            f"the judge's score is {score.value:g}; with compare: pairwise it must be 1 if the first wins, "
            "0 if it loses, or between (judge.parser.scores maps words to numbers)",
            answer,
        )
    return [score, Score(1 - score.value, score.components)]


def _read_ranking(ranked: list[float], components: dict[str, float], answer: str) -> Scores:
    if sorted(ranked) != list(range(1, len(ranked) + 1)):
        raise unreadable(f"the judge's ranking must contain each of 1 to {len(ranked)} once", answer)
    scores: Scores = [Score(0.0)] * len(ranked)
    for place, number in enumerate(ranked):
        scores[int(number) - 1] = Score(1 - place / (len(ranked) - 1), components)
    return scores


_MAX_POLL_SECONDS = 1.0


class QuestionQueue:
    def __init__(
        self, limiter: RateLimiter, size: int, timeout_seconds: float, on_wait: Callable[[str, float], None]
    ) -> None:
        self._limiter = limiter
        self._timeout_seconds = timeout_seconds
        self._on_wait = on_wait
        self._slots = asyncio.Semaphore(size)
        self._head = asyncio.Lock()
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[ExecutionProgress]:
        """Wait until a question may be sent. Its timeout starts then."""
        async with self._slots:
            async with self._head:
                await self._wait_for_limiter()
                charged = self._limiter.admit()
            progress = ExecutionProgress(time.monotonic() + self._timeout_seconds, charged)
            try:
                yield progress
            finally:
                self._limiter.release(charged, progress.used)
                self._ended.set()

    async def _wait_for_limiter(self) -> None:
        since, first_limit = time.monotonic(), ""
        while True:
            self._ended.clear()
            seconds, limit = self._limiter.required_wait()
            if not seconds:
                break
            first_limit = first_limit or limit
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(seconds, _MAX_POLL_SECONDS)):
                    await self._ended.wait()
        if first_limit:
            self._on_wait(first_limit, time.monotonic() - since)


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
        completions = TEMPLATE_FIELDS[judge.compare] if judge.compare else ("completion",)
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
        questions = plan_questions(compare, [completion_text(sample) for sample in group.samples])
        first, *others = group.samples
        shared = {
            name: value
            for name, value in first.extra_info.items()
            if all(name in other.extra_info and other.extra_info[name] == value for other in others)
        }
        fields = fields_of(first) | {"extra_info": shared}  # the prompt, and what all samples have in common
        answers = await asyncio.gather(*(self._ask(question, fields, compare) for question in questions))
        return score_samples(len(group.samples), questions, answers)

    async def _ask(self, question: ComparisonQuestion, fields: dict[str, Any], compare: Compare) -> Scores:
        num_samples = len(question.samples)

        def read(answer: str) -> Scores:
            return read_answer(compare, self._parser, answer, num_samples)

        async with self._queue.acquire() as progress:
            try:
                async with asyncio.timeout(progress.seconds_left):
                    votes = await self._vote(fields | question.fields, read, progress)
                return combine_votes(votes, self._judge.aggregate, num_samples)
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
