"""A judge: question, votes, answers, score. Puts template, parser, limits and the model's server together.

Invariant: an execution's tokens are settled once, however it ends; the endpoint's key reaches its requests alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from rljob_api.contract import ENV_JUDGE_API_KEY
from rljob_api.errors import UserError
from rljob_api.protocol import InvalidReason, Message, ScoreRequest
from rljob_api.scorers import JudgeEndpoint, JudgeReward, Limits
from rljob_reward import beside
from rljob_reward.asking import Asker
from rljob_reward.beside import Beside
from rljob_reward.call_metrics import CallMetrics
from rljob_reward.calls import NoScoreError, Progress, Score
from rljob_reward.judge.gate import LimitGate
from rljob_reward.judge.parser import Parser, combine
from rljob_reward.judge.peers import Peers
from rljob_reward.judge.shares import Share
from rljob_reward.judge.template import Question
from rljob_reward.process import Started
from rljob_reward.texts import describe

_PATH = "/chat/completions"
_FIRST_PROMPT_TOKENS = 1000
"""What a question is thought to have until some have been counted."""
_WARM_UP_SECONDS = 600.0


class JudgeCaller:
    """Asks the judge."""

    def __init__(self, judge: JudgeReward, timeout_seconds: float, metrics: CallMetrics) -> None:
        """UserError: its template or parser is wrong, or what it needs is not there."""
        self._judge = judge
        self._metrics = metrics
        self._question = Question(judge.template, judge.system_prompt)
        self._parser = Parser(judge)
        limits = judge.endpoint.limits if judge.endpoint else Limits()
        each = _FIRST_PROMPT_TOKENS + judge.sampling.max_tokens
        self.gate = LimitGate(limits, judge.votes, float(judge.votes * each))
        self._peers = Peers(timeout_seconds, self._take_share) if limits != Limits() else None
        self._payload = self._build_payload()
        key = _take_key(judge.endpoint) if judge.endpoint else ""
        self._beside = None if judge.endpoint else Beside()
        self._session = self._beside.session if self._beside else beside.open_session()
        base, name = (judge.endpoint.url, "endpoint") if judge.endpoint else (f"{beside.URL}/v1", "vLLM")
        self._asker = Asker(self._session, base.rstrip("/") + _PATH, self, secret=key, name=f"the judge's {name}")

    def _build_payload(self) -> dict[str, Any]:
        """What all requests have in common."""
        endpoint, sampling = self._judge.endpoint, self._judge.sampling
        payload: dict[str, Any] = {
            "model": endpoint.model if endpoint else beside.SERVED_MODEL_NAME,
            "temperature": sampling.temperature,
            endpoint.max_tokens_field if endpoint else "max_tokens": sampling.max_tokens,
        }
        if self._parser.response_format is not None:
            payload["response_format"] = self._parser.response_format
        return payload | sampling.extra_body

    @property
    def can_serve(self) -> bool:
        return self._beside is None or self._beside.is_up

    async def start(self) -> Started:
        if self._peers is not None:
            self._peers.start()
        if self._beside is not None:
            await self._beside.wait()
            await self._warm_up()
        return Started(entrypoint=str(self._payload["model"]), signature="judge")

    async def _warm_up(self) -> None:
        """The first request pays for what vLLM sets up lazily, the schema's grammar too; and a model that refuses such
        requests (it has no chat template) refuses every one."""
        system = self._judge.system_prompt
        messages = [] if system is None else [{"role": "system", "content": system}]
        warm = self._payload | {"messages": [*messages, {"role": "user", "content": "Hello"}], "max_tokens": 1}
        try:
            await self._asker.post(warm, Progress(time.monotonic() + _WARM_UP_SECONDS))
        except NoScoreError as error:
            raise UserError(f"judge.model cannot be asked: {error}") from error

    async def call(self, body: bytes, progress: Progress) -> Score:
        messages = self._question.build_messages(ScoreRequest.model_validate_json(body))
        asked = [self._vote(messages, progress) for _ in range(self._judge.votes)]
        votes, tokens = zip(*await asyncio.gather(*asked), strict=True)
        if None not in tokens:
            progress.used = sum(tokens)
        return combine(votes, self._judge.aggregate)

    async def _vote(self, messages: list[Message], progress: Progress) -> tuple[Score | NoScoreError, float | None]:
        """A vote and its tokens; None: the endpoint did not say how many."""
        tokens = None
        try:
            answer = await self._asker.post(self._payload | {"messages": messages}, progress)
            tokens = self._count_tokens(answer.get("usage"))
            return self._parser.read(_text_of(answer)), tokens
        except NoScoreError as error:
            return error, tokens

    def _count_tokens(self, usage: Any) -> float | None:
        prompt, completion = (_count(usage, f"{kind}_tokens") for kind in ("prompt", "completion"))
        self._metrics.record_tokens(prompt, completion)
        return prompt + completion or None

    async def close(self) -> None:
        if self._peers is not None:
            await self._peers.close()
        if self._beside is not None:
            await self._beside.close()
        await self._session.close()

    def _take_share(self, share: Share | None) -> None:
        self.gate.set_share(share)
        self._metrics.record_peers(share.count if share else 0)

    def record_wait(self, limit: str, seconds: float) -> None:
        self._metrics.record_wait(limit, seconds)

    def record_call(self, outcome: str) -> None:
        self._metrics.record_call(outcome)

    def pause(self, seconds: float) -> None:
        self.gate.pause(seconds)

    async def enter_again(self) -> None:
        await self.gate.enter_again()


def _take_key(endpoint: JudgeEndpoint) -> str:
    """The key, out of the environment: whatever dumps or inherits that has no business with it."""
    key = os.environ.pop(ENV_JUDGE_API_KEY, "").strip()
    reference = endpoint.api_key_secret_ref
    if reference and not key:
        raise UserError(f"${ENV_JUDGE_API_KEY} is not set: Secret {reference.name} has nothing under {reference.key}")
    return key


def _text_of(answer: dict[str, Any]) -> str:
    """What the model wrote. NoScoreError where the answer is no chat completion, was refused, or was cut off."""
    try:
        choice = answer["choices"][0]
        content = choice["message"].get("content")
        refusal = choice["message"].get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise NoScoreError(InvalidReason.BAD_RETURN, f"no chat completion: {describe(answer)}") from None
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
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
