"""The steps of a replay next to those of the run. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api.run.metrics import StepRecord

NUMBERS = (
    *("loss", "policy_loss", "grad_norm", "kl", "entropy", "clip_fraction", "corrected_share", "rejected_share"),
    *("effective_sample_share", "critic_loss", "logprob_difference", "mismatch_kl", "mismatch_max", "learning_rate"),
    *("num_tokens", "trained_share", "num_skipped_updates", "reward", "zero_signal_share"),
)
"""Fields of StepRecord that follow from rows, weights and code alone."""


@dataclass(frozen=True)
class ComparedStep:
    step: int
    recorded: Mapping[str, float | None]
    """By name in NUMBERS; empty: metrics.jsonl of the run has no such step."""
    replayed: Mapping[str, float | None]
    has_equal_weights: bool | None
    """Whether the weights after the step are equal, bit by bit. None: the run has no digest."""

    @property
    def is_equal(self) -> bool:
        """Whether all numbers, and the weights if they are known, are exactly those of the run."""
        return self.has_equal_weights is not False and self.recorded == self.replayed

    def difference(self, name: str) -> float | None:
        """Return the replayed number minus the recorded one; None if one is unknown."""
        before, now = self.recorded.get(name), self.replayed.get(name)
        return None if before is None or now is None else now - before

    @property
    def largest_difference(self) -> float:
        """The largest difference of a number, relative to the recorded one."""
        pairs = [(self.recorded[name], self.difference(name)) for name in self.recorded]
        shares = (abs(found) / max(abs(before or 0.0), 1e-12) for before, found in pairs if found)
        return max(shares, default=math.inf if self._differs_in_presence else 0.0)

    @property
    def _differs_in_presence(self) -> bool:
        return any((self.recorded[name] is None) != (self.replayed.get(name) is None) for name in self.recorded)


def compare_steps(recorded: Iterable[StepRecord], replayed: Iterable[StepRecord]) -> list[ComparedStep]:
    """Return the replayed steps, each with its recorded numbers."""
    before = {record.step: record for record in recorded}
    return [_compare(before.get(record.step), record) for record in replayed]


def _compare(before: StepRecord | None, now: StepRecord) -> ComparedStep:
    known = bool(before and before.weight_digest and now.weight_digest)
    return ComparedStep(
        step=now.step,
        recorded={} if before is None else _numbers(before),
        replayed=_numbers(now),
        has_equal_weights=before.weight_digest == now.weight_digest if before is not None and known else None,
    )


def _numbers(record: StepRecord) -> dict[str, float | None]:
    return {name: getattr(record, name) for name in NUMBERS}


def describe_result(steps: list[ComparedStep]) -> str:
    """Return what the comparison says, in one line."""
    different = [step for step in steps if not step.is_equal]
    if not different:
        has_weights = all(step.has_equal_weights for step in steps)
        return "equal to the run: all numbers" + (", and the weights bit by bit" if has_weights else "")
    first = different[0]
    if not first.recorded:
        return f"step {first.step} is not in metrics.jsonl of the run: there is nothing to compare it with"
    return f"differs from the run, first in step {first.step}: by up to {first.largest_difference:.2g} of a number"


def to_json(step: ComparedStep) -> dict[str, Any]:
    return {
        "step": step.step,
        "is_equal": step.is_equal,
        "has_equal_weights": step.has_equal_weights,
        "recorded": dict(step.recorded),
        "replayed": dict(step.replayed),
        "difference": {name: step.difference(name) for name in step.replayed},
    }
