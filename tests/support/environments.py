"""A policy with given answers and an episode, for tests of environment adapters. No server, no process."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rljob_service.worker import environments
from rljob_service.worker.environments.base import Adapter, Answer, RefusedError
from rljob_service.worker.episodes.types import Access, Episode, Message, Reply
from tests.support.plugins import ADAPTERS

PROMPT: list[Message] = [{"role": "user", "content": "Play."}]


class GivenAnswers:
    """Implements base.Model. Answer n has the id `c<n>`; after the last one the turn limit is reached."""

    def __init__(self, *answers: str | dict[str, Any], code: str = "turn_limit") -> None:
        self._answers, self._code = list(answers), code
        self.conversations: list[list[Message]] = []
        """What the policy saw, by answer."""
        self.tools: list[Mapping[str, Any]] = []

    @property
    def access(self) -> Access:
        return Access("http://127.0.0.1:1", "sk-test", "policy")

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Answer:
        number = len(self.conversations)
        if number == len(self._answers):
            raise RefusedError(self._code, "the episode has no turns left")
        self.conversations.append(list(messages))
        self.tools = list(tools)
        answer = self._answers[number]
        fields = {"content": answer} if isinstance(answer, str) else answer
        return Answer(f"c{number}", {"role": "assistant", **fields}, "stop")

    @property
    def last_seen(self) -> Message:
        """The newest message at the last answer."""
        return self.conversations[-1][-1]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """Return an answer that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "call-1", "type": "function", "function": function}]}


def build_episode(ground_truth: Any = None, max_turns: int = 8, **columns: Any) -> Episode:
    access = Access("http://127.0.0.1:1", "sk-test", "policy")
    row = {"index": 0, "split": "train", **columns}
    return Episode("e-1", 2, access, PROMPT, ground_truth, "games", row, 7, max_turns, 60.0)


def load_adapter(framework: str) -> Adapter:
    return environments.load_adapter(ADAPTERS[framework])


def play(
    framework: str,
    value: Any,
    model: GivenAnswers,
    episode: Episode | None = None,
    args: dict[str, Any] | None = None,
) -> Reply:
    """Play an episode of the user's class, as the runner does."""
    loaded = environments.adopt(load_adapter(framework), value, args or {})
    reply = loaded.play(episode or build_episode(), model)
    return asyncio.run(_wait(reply)) if inspect.isawaitable(reply) else reply


async def _wait(reply: Any) -> Reply:
    played: Reply = await reply
    return played
