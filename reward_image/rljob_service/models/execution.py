"""One execution of a model's service: its progress, and its score or the reason why there is none."""

import time
from dataclasses import dataclass, field

from rljob_api.wire.base import InvalidReason


class NoScoreError(Exception):
    """There is no score, or no reply of a simulated user."""

    def __init__(self, reason: InvalidReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Score:
    value: float
    components: dict[str, float] = field(default_factory=dict)
    logprobs: list[str] | None = None
    """See ScoreResult."""


@dataclass
class ExecutionProgress:
    """The state of one execution: deadline, current activity, and tokens."""

    deadline: float
    """Monotonic time at which it is killed."""
    charged: float = 0.0
    """Tokens that the rate limiter charged in advance."""
    used: float | None = None
    """Tokens that it used. None: unknown."""
    started_at: float = field(default_factory=time.monotonic)
    activity: str = ""
    """Shown in the message when it is killed."""

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()
