"""Services of an agent without servers, a policy whose answers are given, and what both make of a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rljob_api.manifest.agent import Agent
from rljob_api.manifest.services.user import USER_SERVICE
from rljob_api.wire.base import InvalidReason, Lane
from rljob_api.wire.calls import CallRequest, CallResult, ToolSchema
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask, ToolSet
from rljob_trainer.agents.loop import ConversationLoop
from rljob_trainer.episodes.types import Completion, Episode
from tests.support import seconds
from tests.support.chat_templates import ENDS, build_template

MESSAGES = [{"role": "user", "content": "2 + 2?"}]


def make_agent(
    *, user: bool = False, tools: Sequence[str] = (), tool: dict[str, Any] | None = None, **fields: Any
) -> Agent:
    """`tools`: their names; `tool`: further fields that each gets."""
    source = {"function": {"inline": "x"}}
    listed = [{"name": name, **source, **(tool or {})} for name in tools]
    users = {"user": source} if user else {}
    return seconds.validate(Agent, {"type": "loop", "tools": listed, **users, **fields})


def call_text(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def reply(text: str | None, reward: float | None = None, **fields: Any) -> dict[str, Any]:
    return {"text": text, "reward": reward, **fields}


def fail(reason: InvalidReason, message: str = "it failed") -> Callable[[CallRequest], CallResult]:
    return lambda request: CallResult(id=request.id, valid=False, reason=reason, message=message)


class FakeServices:
    """Implements agents.base.Services. An answer is a value, a function of the request, or a list that is used up."""

    def __init__(self, **answers: Any) -> None:
        """By function; `user`: the simulated user. The tool of function f is f-tool."""
        self.answers = answers
        self.requests: list[CallRequest] = []
        self.ended: list[tuple[str, str]] = []
        """Tool and episode of each call of end_episode."""

    async def tools(self) -> ToolSet:
        names = [name for name in self.answers if name != USER_SERVICE]
        schemas = [ToolSchema(name=name, parameters={"type": "object", "properties": {}}) for name in names]
        return ToolSet(schemas, {name: f"{name}-tool" for name in names})

    def end_episode(self, tool: str, episode: str, lane: Lane) -> None:
        self.ended.append((tool, episode))

    async def call(self, service: str, request: CallRequest) -> tuple[CallResult, float]:
        self.requests.append(request)
        key = request.function or USER_SERVICE
        assert service == (USER_SERVICE if key == USER_SERVICE else f"{key}-tool")
        answer = self.answers[key]
        if isinstance(answer, list):
            answer = answer.pop(0)
        while callable(answer):
            answer = answer(request)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if not isinstance(answer, CallResult):
            answer = CallResult(id=request.id, valid=True, value=answer)
        return answer, 0.5


class GivenPolicy:
    """Implements agents.base.Generate."""

    def __init__(self, *texts: Any, family: str = "qwen25") -> None:
        """Texts of answers; a completion is returned as it is, an error raised."""
        self.texts, self.family = list(texts), family
        self.prompts: list[list[int]] = []
        self.limits: list[int | None] = []

    async def __call__(
        self, token_ids: list[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        self.prompts.append(list(token_ids))
        self.limits.append(max_tokens)
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            raise text
        return text if isinstance(text, Completion) else complete(text, self.family)


def complete(text: str, family: str = "qwen25", *, truncated: bool = False) -> Completion:
    token_ids = build_template(family).encode(text if truncated else text + ENDS[family])
    count = len(token_ids)
    return Completion(token_ids, [-0.5] * count, [3] * count, text, truncated, "g")


async def play(
    agent: Agent,
    services: FakeServices,
    policy: GivenPolicy,
    *,
    context_length: int | None = None,
    messages: list[dict[str, Any]] | None = None,
) -> Episode:
    loop = ConversationLoop(agent, services, build_template(policy.family), context_length)
    prompt = Prompt(7, messages or MESSAGES, [1, 2], "4", "sums", {"index": 7, "level": "easy"})
    [episode] = await loop.run(EpisodeTask("g/train/1/5/2", "train", prompt, 5, 2, policy))
    return episode
