"""Failures of a run by reason, with their first messages. Pure.

Counts are of the whole run, from metrics.jsonl; messages are from the samples that the report read.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rljob_api.run.metrics import Metrics
from rljob_api.run.trajectories import SampleRow

_MAX_MESSAGES = 5
_LITERAL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
"""What differs between messages of the same failure: quoted texts and numbers."""


@dataclass(frozen=True)
class Message:
    reward: str
    step: int
    text: str
    count: int
    """Samples with this message among those that were read, whatever its quoted texts and numbers."""


@dataclass(frozen=True)
class FailureReason:
    reason: str
    count: int
    """In all steps and evaluations."""
    first_step: int
    messages: tuple[Message, ...]
    """The first of each kind."""
    num_more: int
    """Further kinds."""


def summarize_failures(metrics: Metrics, samples: Iterable[SampleRow]) -> list[FailureReason]:
    """Return the reasons, most frequent first. `samples`: oldest first."""
    counts: Counter[str] = Counter()
    first_steps: dict[str, int] = {}
    counted = [(record.step, record.invalid_by_reason) for record in metrics.records]
    counted += [(record.step, record.scored_failures_by_reason) for record in metrics.steps]
    for step, by_reason in counted:
        for reason, count in by_reason.items():
            counts[reason] += count
            first_steps[reason] = min(step, first_steps.get(reason, step))
    seen: dict[str, dict[tuple[str, str], Message]] = {}
    for sample in samples:
        for result in sample.rewards:
            if result.reason:  # also of one that has a score by failurePolicy.scores
                text = result.message.strip()
                found = seen.setdefault(result.reason, {})
                kind = (result.name, _LITERAL.sub("", text))
                first = found.get(kind, Message(result.name, sample.step, text, 0))
                found[kind] = replace(first, count=first.count + 1)
    reasons = sorted({*counts, *seen}, key=lambda reason: (-counts[reason], reason))
    return [_describe(reason, counts[reason], first_steps, [*seen.get(reason, {}).values()]) for reason in reasons]


def _describe(reason: str, count: int, first_steps: dict[str, int], messages: Sequence[Message]) -> FailureReason:
    first = first_steps.get(reason, messages[0].step if messages else 0)
    count = count or sum(message.count for message in messages)
    return FailureReason(reason, count, first, tuple(messages[:_MAX_MESSAGES]), max(0, len(messages) - _MAX_MESSAGES))
