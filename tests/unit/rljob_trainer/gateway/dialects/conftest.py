"""Answers of the policy, without a gateway."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rljob_trainer.episodes.types import Completion
from rljob_trainer.gateway.types import ModelAnswer

NUM_PROMPT_TOKENS = 7
TOKENS = ["Fo", "ur"]


def _answer(
    content: str | None = "Four",
    calls: Sequence[tuple[str, str]] = (),
    reasoning: str = "",
    finish: str = "",
    id: str = "chatcmpl-1",
) -> ModelAnswer:
    """Return an answer of two tokens. `calls`: name and arguments."""
    number = id.rpartition("-")[2]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{number}_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    finish = finish or ("tool_calls" if calls else "stop")
    completion = Completion([5, 6], [-0.5, -0.25], [0, 0], content or "", truncated=finish == "length")
    return ModelAnswer(id, 1700000000, message, finish, completion, NUM_PROMPT_TOKENS, TOKENS)


@pytest.fixture(scope="session")
def make_answer() -> Callable[..., ModelAnswer]:
    return _answer


@pytest.fixture(scope="session")
def read_events() -> Callable[[Sequence[bytes]], list[dict[str, Any]]]:
    """Return the data of events, with the name under `event`, as a client reads a stream."""

    def read(events: Sequence[bytes]) -> list[dict[str, Any]]:
        blocks = b"".join(events).decode().strip("\n").split("\n\n")
        read = []
        for block in blocks:
            lines = dict(line.split(": ", 1) for line in block.split("\n"))
            data = {} if lines["data"] == "[DONE]" else json.loads(lines["data"])
            read.append({"event": lines.get("event", ""), **data})
        return read

    return read
