"""What an adapter makes of a user's function: how it is called for some samples, and how its answer is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rljob_reward.worker.adapters.outcome import Outcome

Sample = dict[str, Any]
"""A ScoreRequest as JSON gave it; fields with defaults may be missing. `result` is the ScoreResult that it got when it
was scored alone, if it was."""


class Binding(NamedTuple):
    """A function ready to be called. One that takes a sample alone is given lists of one."""

    call: Callable[[list[Sample]], Any]
    """Calls the user's function. May return an awaitable."""
    read: Callable[[Any, list[Sample]], list[Outcome]]
    """Reads what it returned: one outcome a sample, or a single one with a reason, which is that of all samples."""
