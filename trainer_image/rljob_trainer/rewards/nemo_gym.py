"""POST /verify of a NeMo Gym resources server: the row with the policy's answer, and the reward in return. Pure.

The body has the columns of the row, `responses_create_params` with the prompt, and `response`, an answer of OpenAI's
Responses API with the completion as its text. The server sends all of it back, with `reward` and its own fields.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from rljob_api.wire.contract import MAX_COMPONENTS
from rljob_api.wire.scores import ScoreRequest

_PROMPT, _RESPONSE = "responses_create_params", "response"


def build_body(sample: ScoreRequest) -> dict[str, Any]:
    """Return the body. A column `responses_create_params` keeps its other fields, such as tools."""
    columns = dict(sample.extra_info)
    if sample.answer_column:
        columns[sample.answer_column] = sample.ground_truth
    given = columns.get(_PROMPT)
    prompt = sample.prompt if isinstance(sample.prompt, str) else [dict(message) for message in sample.prompt]
    content = {"type": "output_text", "text": sample.completion, "annotations": []}
    message = {"id": "msg_0", "type": "message", "role": "assistant", "status": "completed", "content": [content]}
    response = {
        "id": sample.id,
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "output": [message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    params = {**(given if isinstance(given, Mapping) else {}), "input": prompt}
    return {**columns, _PROMPT: params, _RESPONSE: response}


def read_reward(text: str, sent: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """Return the reward, and the numbers that the server added to what was `sent`. Raise ValueError, KeyError or
    TypeError for another response."""
    answer = json.loads(text)
    reward = answer["reward"]
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise TypeError(f"reward must be a number, got {reward!r:.80}")
    numbers = ((name, value) for name, value in answer.items() if name != "reward" and name not in sent)
    components = {name: float(value) for name, value in numbers if isinstance(value, int | float)}
    finite = {name: value for name, value in components.items() if math.isfinite(value)}
    return float(reward), dict(list(finite.items())[:MAX_COMPONENTS])
