"""Which trajectories a report shows: all of a small run, of a large one those that say most about it. Pure.

Invariant: of each step that is read, the best, the worst and the first sample of each kind of failure come first.
"""

import json
from collections.abc import Sequence
from typing import Any

from rljob_api.run.trajectories import SampleRow
from rljob_api.wire.base import Message
from rljob_cli.trajectories.tables import cut_middle, format_content, format_prompt

MAX_SAMPLES = 800
MAX_CHARACTERS = 2_000_000
"""Limit of all texts together: bounds the size of the page."""
_MAX_TEXT_CHARACTERS = 6_000
"""Limit of one text. The rest is cut from its middle."""
_MAX_MESSAGE_CHARACTERS = 2_000


def spread(count: int) -> list[int]:
    """Return the indices 0 to count - 1 so that the first n of them are spread over all: last, first, middle, ..."""
    if count <= 2:
        return list(reversed(range(count)))
    order = {count - 1: None, 0: None}  # an ordered set
    size = count - 1
    while len(order) < count:
        size = max(1, -(-size // 2))
        order |= dict.fromkeys(range(size, count - 1, size))
    return list(order)


def rank_samples(rows: Sequence[SampleRow]) -> list[int]:
    """Return the indices of the rows of one step and lane, the most informative first."""
    scored = [i for _, i in sorted((row.score, i) for i, row in enumerate(rows) if row.score is not None)]
    firsts: dict[tuple[str, str], int] = {}
    for index, row in enumerate(rows):
        for reward in row.rewards:
            if not reward.valid:
                firsts.setdefault((reward.name, reward.reason or ""), index)
    informative = [*scored[-1:], *scored[:1], *firsts.values(), *scored[-3:], *scored[:3]]
    return list(dict.fromkeys([*informative, *spread(len(rows))]))


def choose_samples(
    steps: Sequence[Sequence[SampleRow]], max_samples: int = MAX_SAMPLES, max_characters: int = MAX_CHARACTERS
) -> list[SampleRow]:
    """Return the chosen rows in the given order. `steps`: the rows of each step and lane.

    Each step gives one sample in turn, so that all are shown evenly until the limits are reached.
    """
    ranked = [rank_samples(rows) for rows in steps]
    chosen: set[tuple[int, int]] = set()
    characters = 0
    for turn in range(max((len(order) for order in ranked), default=0)):
        for number, order in enumerate(ranked):
            if turn >= len(order):
                continue
            row = steps[number][order[turn]]
            size = sum(min(len(text), _MAX_TEXT_CHARACTERS) for text in (row.prompt, format_answers(row)))
            if len(chosen) >= max_samples or (chosen and characters + size > max_characters):
                return _in_order(steps, chosen)
            chosen.add((number, order[turn]))
            characters += size
    return _in_order(steps, chosen)


def _in_order(steps: Sequence[Sequence[SampleRow]], chosen: set[tuple[int, int]]) -> list[SampleRow]:
    return [steps[number][index] for number, index in sorted(chosen)]


def describe_sample(row: SampleRow) -> dict[str, Any]:
    """Return what the page shows of a sample; long texts keep both ends."""
    truth = row.ground_truth
    return {
        "step": row.step,
        "lane": row.lane,
        "group": row.group,
        "sample": row.sample,
        "score": row.score,
        "advantage": row.advantage,
        "truncated": row.truncated,
        "tokens": row.num_sampled_tokens,
        "prompt": cut_middle(format_prompt(row.prompt), _MAX_TEXT_CHARACTERS),
        "completion": cut_middle(format_answers(row), _MAX_TEXT_CHARACTERS),
        "truth": None if truth is None else cut_middle(truth, _MAX_TEXT_CHARACTERS),
        "rewards": [
            {
                "name": reward.name,
                "valid": reward.valid,
                "score": reward.score,
                "components": reward.components,
                "reason": reward.reason,
                "attempts": reward.attempts,
                "message": cut_middle(reward.message, _MAX_MESSAGE_CHARACTERS),
                "latency": reward.latency_seconds,
            }
            for reward in row.rewards
        ],
    }


def format_answers(row: SampleRow) -> str:
    """Return the completion; of a conversation with several answers, all that follows the prompt."""
    if row.messages is None or len(row.turns or ()) < 2:  # null with one answer
        return row.completion
    prompt, messages = json.loads(row.prompt), json.loads(row.messages)
    num_prompt = len(prompt) if messages[: len(prompt)] == prompt else 0
    return "\n".join(f"{message['role']}: {_format_message(message)}" for message in messages[num_prompt:])


def _format_message(message: Message) -> str:
    """Return the text of a message, then its tool calls."""
    content = message.get("content")
    text = "" if content is None else format_content(content)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    shown = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return "\n".join([*([text] if text else []), *shown])
