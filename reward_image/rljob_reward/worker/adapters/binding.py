"""A user's function, bound by an adapter: how to call it for samples, and how to read its return value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rljob_reward.worker.adapters.outcome import Outcome

Sample = dict[str, Any]
"""A ScoreRequest from JSON; fields with defaults may be missing. `result` is its ScoreResult from the first step of
scope: sampleThenGroup."""


class Binding(NamedTuple):
    """A function ready to be called. One that takes a single sample gets lists of length one."""

    call: Callable[[list[Sample]], Any]
    """Call the user's function. May return an awaitable."""
    read: Callable[[Any, list[Sample]], list[Outcome]]
    """Read its return value: one outcome per sample, or a single one with a reason, which applies to all samples."""
