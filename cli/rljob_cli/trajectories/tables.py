"""How `rljob trajectories` shows results.

Invariant: a cut text has a mark and keeps both ends; answers are at the end.
"""

import json
from typing import Any

from rich.text import Text

from rljob_api.run.trajectories import ResultRow, SampleRow
from rljob_cli.output import to_text

_MAX_TEXT_CHARACTERS = 400


def name_sample(row: SampleRow) -> str:
    """Return group and sample; of an episode with seats, also the seat, and which of its trajectories it is."""
    return f"{row.group}/{row.sample}" + (f"/{row.trajectory} {row.seat}" if row.seat else "")


def describe_reward(reward: ResultRow) -> Text:
    """Return a reward's score, components and latency, or why the result is invalid."""
    if reward.valid:
        lines = [number(reward.score)]
        lines += [f"{name} {number(value)}" for name, value in reward.components.items()]
    else:
        lines = [f"invalid: {reward.reason}", *([reward.message] if reward.message else [])]
    attempts = reward.attempts or 0
    latency = reward.latency_seconds if reward.latency_seconds is not None else reward.execute_seconds
    lines.append(f"{seconds(latency)}{f', {attempts} attempts' if attempts > 1 else ''}")
    return Text(", ".join(lines), style="" if reward.valid else "red")


def format_prompt(prompt: str) -> str:
    """Return a conversation, which the log has as JSON, as one `role: text` per message; other prompts unchanged."""
    if not prompt.startswith("[{"):
        return prompt
    try:
        messages = json.loads(prompt)
    except ValueError:
        return prompt
    is_chat = all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages)
    return "\n".join(f"{m['role']}: {format_content(m['content'])}" for m in messages) if is_chat else prompt


def format_content(content: Any) -> str:
    """Return the text of a message, whose parts may be listed; parts without text stay JSON."""
    if not isinstance(content, list):
        return to_text(content)
    texts = (part.get("text") if isinstance(part, dict) else None for part in content)
    return " ".join(to_text(part if text is None else text) for text, part in zip(texts, content, strict=True))


def cut_middle(text: str, limit: int) -> str:
    """Return a text without its middle, if it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def shorten(text: str, full: bool) -> str:
    return text if full else cut_middle(text, _MAX_TEXT_CHARACTERS)


def number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 100:
        return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
