"""A teacher: asks vLLM's /completions for the log-probs of an episode's tokens, once, at its end.

Each segment is a prompt of token ids, whose sampled tokens get log-probs. The driver, which knows those of the policy,
turns them into advantages; the score here is their mean. Invariant: ids mean the same text to the teacher as to the
policy; the first that does not ends the server.
"""

import base64
import math
import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from rljob_api.errors import RLJobError, UserError
from rljob_api.manifest.services.models import JudgeSampling, TeacherReward
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreRequest, TokenSegment, list_likeliest
from rljob_service.models.chat import ChatBackend, ChatSettings
from rljob_service.models.execution import ExecutionProgress, NoScoreError, Score
from rljob_service.models.metrics import UpstreamMetrics
from rljob_service.models.texts import describe
from rljob_service.results import StartupReport

_MAX_ANSWER_BYTES = 64 << 20
"""vLLM writes 80 bytes for each token, and as many for each of the likeliest."""


class Teacher(ChatBackend):
    """A model on the vLLM sidecar, in the trainer's Pods, or at an endpoint."""

    def __init__(
        self,
        teacher: TeacherReward,
        replicas: int,
        metrics: UpstreamMetrics,
        on_fatal_error: Callable[[RLJobError], None],
    ) -> None:
        """Raises UserError if the key or vLLM's socket is missing."""
        self._top_k = teacher.top_k
        settings = ChatSettings(
            who="teacher",
            path="teacher",
            route="/completions",
            model=teacher.model,
            endpoint=teacher.endpoint,
            sampling=JudgeSampling(max_tokens=1),
            payload={"prompt_logprobs": self._top_k},
            max_answer_bytes=_MAX_ANSWER_BYTES * (1 + self._top_k),
        )
        super().__init__(settings, replicas, metrics, on_fatal_error)
        self._on_fatal_error = on_fatal_error

    async def start(self) -> StartupReport:
        return (await super().start()).model_copy(update={"reads": ["segments"]})

    async def execute(self, body: bytes, progress: ExecutionProgress) -> list[Score]:
        segments = list_segments(ScoreRequest.model_validate_json(body))
        progress.used = float(sum(len(segment.token_ids) for segment in segments))
        found = [await self._score(segment, progress) for segment in segments]
        told = [of_token for each in found for of_token in each]
        if not all(math.isfinite(value) for of_token in told for value in of_token):
            raise NoScoreError(InvalidReason.NOT_FINITE, "the teacher returned log-probs that are not finite")
        mean = math.fsum(logprob for logprob, *_ in told) / len(told) if told else 0.0
        pack = struct.Struct("<f" + "if" * self._top_k).pack
        records = (b"".join(pack(*of_token) for of_token in each) for each in found)
        return [Score(mean, logprobs=[base64.b64encode(each).decode() for each in records])]

    async def _ask_for_nothing(self, progress: ExecutionProgress) -> None:
        await self.upstream.post(self.payload | {"prompt": "Hello"}, progress)

    async def _score(self, segment: TokenSegment, progress: ExecutionProgress) -> list[list[float]]:
        """Return the log-prob of each sampled token, and after it each of the likeliest tokens with its own."""
        if not segment.sampled:
            return []
        ids = segment.token_ids[: segment.sampled[-1][1]]
        answer = await self.upstream.post(self.payload | {"prompt": ids}, progress)
        try:
            answered = answer["choices"][0]["prompt_logprobs"]
            entries: list[Any] = [each and each[str(token)] for each, token in zip(answered, ids, strict=True)]
            positions = [i for start, end in segment.sampled for i in range(start, end)]
            told = [
                [float(entries[i]["logprob"]), *chain(*list_likeliest(answered[i], self._top_k))] for i in positions
            ]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            message = f"no log-probs of the prompt's tokens: {describe(answer)}"
            raise NoScoreError(InvalidReason.BAD_RETURN, message) from None
        if problem := find_other_text(segment, entries):
            self._on_fatal_error(UserError(f"teacher {problem}; it needs the policy's tokenizer"))
            raise NoScoreError(InvalidReason.BAD_RETURN, problem)
        return told


def list_segments(request: ScoreRequest) -> list[TokenSegment]:
    """Return the segments of an episode; of a request without any, prompt and completion as one. Raises NoScoreError
    without token ids."""
    if request.segments is not None:
        return request.segments
    given = request.whole or request
    if given.prompt_ids is None or given.completion_ids is None:
        raise NoScoreError(InvalidReason.BAD_REQUEST, "a teacher needs segments, or prompt_ids and completion_ids")
    ids, start = [*given.prompt_ids, *given.completion_ids], len(given.prompt_ids)
    return [TokenSegment(token_ids=ids, sampled=[(start, len(ids))] if start < len(ids) else [])]


def find_other_text(segment: TokenSegment, entries: Sequence[Any]) -> str:
    """Return which token is another text to the teacher; empty if all are the same, or unknown. Parts of characters
    have no text of their own, and what decoders do to spaces is no difference."""
    for token, own, entry in zip(segment.token_ids, segment.texts, entries, strict=False):
        other = entry and entry.get("decoded_token")
        if other and own and "\ufffd" not in other + own and other.split() != own.split():
            return f"reads token {token} as {other!r}, which is {own!r} to the policy"
    return ""
