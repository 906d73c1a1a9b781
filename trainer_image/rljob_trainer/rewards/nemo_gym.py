"""POST /verify of a NeMo Gym resources server: the row with the policy's answer, and the reward in return. Pure.

The body has the columns of the row, `responses_create_params` with the prompt, and `response`, an answer of OpenAI's
Responses API with all that followed the prompt: reasoning, text and calls of tools are items of their own, as model
servers of NeMo Gym write them. The server sends all of it back, with `reward` and its own fields.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from rljob_api.functions.values import content_text
from rljob_api.wire.base import Message
from rljob_api.wire.contract import MAX_COMPONENTS
from rljob_api.wire.scores import ScoreRequest
from rljob_trainer.conversation.reasoning import END, START, strip_marks

_PROMPT, _RESPONSE = "responses_create_params", "response"
_COMPONENTS = "reward_components"


def build_body(sample: ScoreRequest) -> dict[str, Any]:
    """Return the body. A column `responses_create_params` keeps its other fields, such as tools."""
    columns = dict(sample.extra_info)
    if sample.answer_column:
        columns[sample.answer_column] = sample.ground_truth
    given = columns.get(_PROMPT)
    prompt = sample.prompt if isinstance(sample.prompt, str) else [dict(message) for message in sample.prompt]
    answer = [{"role": "assistant", "content": sample.completion}]
    messages = answer if sample.whole is None else sample.whole.messages
    response = {
        "id": sample.id,
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "output": [item for number, message in enumerate(messages) for item in _write_items(message, number)],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    params = {**(given if isinstance(given, Mapping) else {}), "input": prompt}
    return {**columns, _PROMPT: params, _RESPONSE: response}


def _write_items(message: Message, number: int) -> Iterator[dict[str, Any]]:
    text, role = content_text(message.get("content")), message["role"]
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": text}
        return
    if role != "assistant":
        yield {"type": "message", "role": role, "content": text}
        return
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls") or []
    if not reasoning and (END in text or text.lstrip().startswith(START)):  # the prompt may have ended with <think>
        reasoning, _, text = text.partition(END)
        text = text.lstrip()
    if reasoning:
        summary = [{"type": "summary_text", "text": strip_marks(reasoning)}]
        yield {"id": f"rs_{number}", "type": "reasoning", "summary": summary}
    if text or not calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        own = {"id": f"msg_{number}", "type": "message", "role": role, "status": "completed"}
        yield {**own, "content": content}
    for call in calls:
        yield {"type": "function_call", "call_id": call["id"], "status": "completed", **call["function"]}


def read_reward(text: str, sent: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """Return the reward, and the numbers that the server added to what was `sent`. Raise ValueError, KeyError or
    TypeError for another response."""
    answer = json.loads(text)
    reward = answer["reward"]
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise TypeError(f"reward must be a number, got {reward!r:.80}")
    parts = answer.get(_COMPONENTS)
    added = {**answer, **parts} if isinstance(parts, Mapping) else answer
    numbers = ((name, value) for name, value in added.items() if name != "reward" and name not in sent)
    components = {name: float(value) for name, value in numbers if isinstance(value, int | float)}
    finite = {name: value for name, value in components.items() if math.isfinite(value)}
    return float(reward), dict(list(finite.items())[:MAX_COMPONENTS])
