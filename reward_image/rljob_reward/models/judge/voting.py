"""Send one question as many times as there are votes.

The caller reads the answers. Invariant: a failed vote is a value, not an exception, so that it does not affect the
other votes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from rljob_api.manifest.scorers import JudgeReward
from rljob_api.wire.protocol import InvalidReason, Message
from rljob_reward.models import vllm_sidecar
from rljob_reward.models.execution import ExecutionProgress, NoScoreError
from rljob_reward.models.metrics import UpstreamMetrics
from rljob_reward.models.texts import describe
from rljob_reward.models.upstream import UpstreamClient

_MAX_TOKENS = 10**8
"""Larger counts are ignored: charging them would block the limit indefinitely."""

T = TypeVar("T")


class Voting:
    def __init__(
        self,
        judge: JudgeReward,
        response_format: dict[str, Any] | None,
        upstream: UpstreamClient,
        metrics: UpstreamMetrics,
    ) -> None:
        self._judge = judge
        self._upstream = upstream
        self._metrics = metrics
        self._payload = _build_payload(judge, response_format)
        self.model = str(self._payload["model"])

    async def warm_up(self, progress: ExecutionProgress) -> None:
        """Send a minimal question that initializes everything in vLLM, including the grammar of the schema."""
        system = self._judge.system_prompt
        messages = [] if system is None else [{"role": "system", "content": system}]
        warm = self._payload | {"messages": [*messages, {"role": "user", "content": "Hello"}], "max_tokens": 1}
        await self._upstream.post(warm, progress)

    async def ask(
        self, messages: list[Message], read: Callable[[str], T], progress: ExecutionProgress
    ) -> list[T | NoScoreError]:
        pending = [self._vote(messages, read, progress) for _ in range(self._judge.votes)]
        votes, tokens = zip(*await asyncio.gather(*pending), strict=True)
        if None not in tokens:
            progress.used = sum(tokens)
        return list(votes)

    async def _vote(
        self, messages: list[Message], read: Callable[[str], T], progress: ExecutionProgress
    ) -> tuple[T | NoScoreError, float | None]:
        """Return a vote and its tokens; None if the endpoint did not report them."""
        tokens = None
        try:
            answer = await self._upstream.post(self._payload | {"messages": messages}, progress)
            tokens = self._count_tokens(answer.get("usage"))
            return read(_text_of(answer, self._upstream.hide_key)), tokens
        except NoScoreError as error:
            return error, tokens

    def _count_tokens(self, usage: Any) -> float | None:
        prompt, completion = (_count(usage, f"{kind}_tokens") for kind in ("prompt", "completion"))
        self._metrics.record_tokens(prompt, completion)
        return prompt + completion or None


def _build_payload(judge: JudgeReward, response_format: dict[str, Any] | None) -> dict[str, Any]:
    endpoint, sampling = judge.endpoint, judge.sampling
    payload: dict[str, Any] = {
        "model": endpoint.model if endpoint else vllm_sidecar.SERVED_MODEL_NAME,
        "temperature": sampling.temperature,
        endpoint.max_tokens_field if endpoint else "max_tokens": sampling.max_tokens,
    }
    if response_format is not None:
        payload["response_format"] = response_format
    return payload | sampling.extra_body


def _text_of(answer: dict[str, Any], hide_key: Callable[[str], str]) -> str:
    """Return the model's text. Raises NoScoreError if it was refused or cut off, or is not a chat completion."""
    try:
        choice = answer["choices"][0]
        content = choice["message"].get("content")
        refusal = choice["message"].get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        shown = describe(hide_key(str(answer)))
        raise NoScoreError(InvalidReason.BAD_RETURN, f"not a chat completion: {shown}") from None
    if isinstance(content, str) and content:
        if choice.get("finish_reason") == "length":
            message = f"the judge's answer was cut off at sampling.maxTokens: {describe(content)}"
            raise NoScoreError(InvalidReason.BAD_RETURN, message)
        return content
    if refusal:
        raise NoScoreError(InvalidReason.BAD_RETURN, f"the judge refused: {describe(refusal)}")
    cause = ": sampling.maxTokens is too low" if choice.get("finish_reason") == "length" else ""
    raise NoScoreError(InvalidReason.BAD_RETURN, f"the judge's answer is empty{cause}")


def _count(usage: Any, name: str) -> float:
    value = usage.get(name) if isinstance(usage, dict) else None
    return float(value) if isinstance(value, int | float) and 0 < value <= _MAX_TOKENS else 0.0
