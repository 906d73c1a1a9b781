"""Which pool a reward's kind has. Imports of models and judges stay out of a server that runs a function."""

from __future__ import annotations

from collections.abc import Callable

from rljob_api.errors import TransientError
from rljob_reward.loading import Settings
from rljob_reward.metrics import Metrics
from rljob_reward.pool import Pool
from rljob_reward.program import Program
from rljob_reward.slots import SlotPool


def build_pool(
    program: Program,
    metrics: Metrics,
    *,
    on_idle: Callable[[], None],
    on_hopeless: Callable[[TransientError], None],
) -> SlotPool:
    """The pool of this reward's kind."""
    assert isinstance(program.backend, Settings)
    return Pool(
        program.backend,
        program.slots,
        on_idle=on_idle,
        on_restart=metrics.record_restart,
        on_hopeless=on_hopeless,
    )
