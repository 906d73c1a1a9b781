"""Failures of a run by reason, with their first messages. Pure.

Counts are of the whole run, from metrics.jsonl; messages are from the samples that the report read.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rljob_cli.run.runfolder import Row

_MAX_MESSAGES = 5


@dataclass(frozen=True)
class Message:
    reward: str
    step: int
    text: str
    count: int
    """Samples with this message among those that were read."""


@dataclass(frozen=True)
class FailureReason:
    reason: str
    count: int
    """In all steps and evaluations."""
    first_step: int
    messages: tuple[Message, ...]
    """The first distinct ones."""
    num_more: int
    """Further distinct messages."""


def summarize_failures(metrics: Sequence[Row], samples: Iterable[Row]) -> list[FailureReason]:
    """Return the reasons, most frequent first. `samples`: oldest first."""
    counts: Counter[str] = Counter()
    first_steps: dict[str, int] = {}
    for row in metrics:
        for reason, count in (row.get("invalid_by_reason") or {}).items():
            if count:
                counts[reason] += count
                first_steps[reason] = min(row["step"], first_steps.get(reason, row["step"]))
    seen: dict[str, dict[tuple[str, str], list[int]]] = {}
    for sample in samples:
        for reward in sample["rewards"]:
            if not reward["valid"]:
                found = seen.setdefault(reward["reason"], {})
                entry = found.setdefault((reward["name"], (reward["message"] or "").strip()), [sample["step"], 0])
                entry[1] += 1
    reasons = sorted({*counts, *seen}, key=lambda reason: (-counts[reason], reason))
    return [_describe(reason, counts[reason], first_steps, seen.get(reason, {})) for reason in reasons]


def _describe(
    reason: str, count: int, first_steps: dict[str, int], found: dict[tuple[str, str], list[int]]
) -> FailureReason:
    messages = [Message(name, step, text, number) for (name, text), (step, number) in found.items()]
    first = first_steps.get(reason, messages[0].step if messages else 0)
    count = count or sum(message.count for message in messages)
    return FailureReason(reason, count, first, tuple(messages[:_MAX_MESSAGES]), max(0, len(messages) - _MAX_MESSAGES))
