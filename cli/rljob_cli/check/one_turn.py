"""What extra_info has about a conversation with a single answer: for calls of a reward without an episode. Pure."""

from __future__ import annotations

from typing import Any

from rljob_api.manifest.agent import Agent
from rljob_api.wire.protocol import Message


def describe_one_turn(agent: Agent, prompt: str | list[Message], completion: str) -> dict[str, Any]:
    """Return messages, turns, state and end, as the driver sends them with an agent; nothing with singleTurn."""
    if agent.type == "singleTurn":
        return {}
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {
        "messages": [*asked, {"role": "assistant", "content": completion}],
        "turns": [{"text": completion, "reward": None, "tool_calls": []}],
        "state": {},
        "end": "returned" if agent.is_hosted else "user" if agent.user else "answered",
    }
