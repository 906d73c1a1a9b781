"""One question, asked as many times as there are votes, with what all requests have in common.

Leaves sending to an Asker and reading to who asks. Invariant: a vote that fails is a value, not an exception, so that
one costs no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from rljob_api.manifest.scorers import JudgeReward
from rljob_api.wire.protocol import InvalidReason, Message
from rljob_reward.models import vllm_sidecar as beside
from rljob_reward.models.metrics import CallMetrics
from rljob_reward.models.model_slots import NoScoreError, Progress
from rljob_reward.models.texts import describe
from rljob_reward.models.upstream import Asker

_MOST_TOKENS = 10**8
"""No request has more: what claims so is no count, and charging it would close the limit for ever."""

T = TypeVar("T")


class Voting:
    """Asks the judge's model."""

    def __init__(
        self, judge: JudgeReward, response_format: dict[str, Any] | None, asker: Asker, metrics: CallMetrics
    ) -> None:
        self._judge = judge
        self._asker = asker
        self._metrics = metrics
        self._payload = _build_payload(judge, response_format)

    @property
    def model(self) -> str:
        return str(self._payload["model"])

    async def warm_up(self, progress: Progress) -> None:
        """The least question, with everything that vLLM sets up lazily, the schema's grammar too."""
        system = self._judge.system_prompt
        messages = [] if system is None else [{"role": "system", "content": system}]
        warm = self._payload | {"messages": [*messages, {"role": "user", "content": "Hello"}], "max_tokens": 1}
        await self._asker.post(warm, progress)

    async def ask(
        self, messages: list[Message], read: Callable[[str], T], progress: Progress
    ) -> list[T | NoScoreError]:
        """All votes."""
        asked = [self._vote(messages, read, progress) for _ in range(self._judge.votes)]
        votes, tokens = zip(*await asyncio.gather(*asked), strict=True)
        if None not in tokens:
            progress.used = sum(tokens)
        return list(votes)

    async def _vote(
        self, messages: list[Message], read: Callable[[str], T], progress: Progress
    ) -> tuple[T | NoScoreError, float | None]:
        """A vote and its tokens; None: the endpoint did not say how many."""
        tokens = None
        try:
            answer = await self._asker.post(self._payload | {"messages": messages}, progress)
            tokens = self._count_tokens(answer.get("usage"))
            return read(_text_of(answer, self._asker.hide_key)), tokens
        except NoScoreError as error:
            return error, tokens

    def _count_tokens(self, usage: Any) -> float | None:
        prompt, completion = (_count(usage, f"{kind}_tokens") for kind in ("prompt", "completion"))
        self._metrics.record_tokens(prompt, completion)
        return prompt + completion or None


def _build_payload(judge: JudgeReward, response_format: dict[str, Any] | None) -> dict[str, Any]:
    """What all requests have in common."""
    endpoint, sampling = judge.endpoint, judge.sampling
    payload: dict[str, Any] = {
        "model": endpoint.model if endpoint else beside.SERVED_MODEL_NAME,
        "temperature": sampling.temperature,
        endpoint.max_tokens_field if endpoint else "max_tokens": sampling.max_tokens,
    }
    if response_format is not None:
        payload["response_format"] = response_format
    return payload | sampling.extra_body


def _text_of(answer: dict[str, Any], hide_key: Callable[[str], str]) -> str:
    """What the model wrote. NoScoreError where the answer is no chat completion, was refused, or was cut off."""
    try:
        choice = answer["choices"][0]
        content = choice["message"].get("content")
        refusal = choice["message"].get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        shown = describe(hide_key(str(answer)))
        raise NoScoreError(InvalidReason.BAD_RETURN, f"no chat completion: {shown}") from None
    if isinstance(content, str) and content:
        if choice.get("finish_reason") == "length":
            message = f"the judge's answer was cut off at sampling.maxTokens: {describe(content)}"
            raise NoScoreError(InvalidReason.BAD_RETURN, message)
        return content
    if refusal:
        raise NoScoreError(InvalidReason.BAD_RETURN, f"the judge refused: {describe(refusal)}")
    why = ": sampling.maxTokens were too few" if choice.get("finish_reason") == "length" else ""
    raise NoScoreError(InvalidReason.BAD_RETURN, f"the judge wrote nothing{why}")


def _count(usage: Any, name: str) -> float:
    value = usage.get(name) if isinstance(usage, dict) else None
    return float(value) if isinstance(value, int | float) and 0 < value <= _MOST_TOKENS else 0.0
