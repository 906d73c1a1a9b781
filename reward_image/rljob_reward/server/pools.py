"""Which pool a reward's kind has. Imports of models and judges stay out of a server that runs a function."""

from __future__ import annotations

from collections.abc import Callable

from rljob_api.errors import TransientError
from rljob_api.manifest.scorers import JudgeReward
from rljob_reward.server.metrics import Metrics
from rljob_reward.server.served_reward import Program
from rljob_reward.slots import SlotPool
from rljob_reward.worker.loading import Settings
from rljob_reward.workers.pool import Pool


def build_pool(
    program: Program,
    metrics: Metrics,
    *,
    on_idle: Callable[[], None],
    on_hopeless: Callable[[TransientError], None],
) -> SlotPool:
    """The pool of this reward's kind."""
    backend = program.backend
    if isinstance(backend, Settings):
        return Pool(
            backend,
            program.slots,
            on_idle=on_idle,
            on_restart=metrics.record_restart,
            on_hopeless=on_hopeless,
        )
    from rljob_reward.models.metrics import CallMetrics
    from rljob_reward.models.model_slots import Caller, CallPool

    caller: Caller
    if isinstance(backend, JudgeReward):
        from rljob_reward.models.judge.caller import JudgeCaller

        caller = JudgeCaller(backend, program.slots, program.timeout_seconds, CallMetrics(metrics))
    else:
        from rljob_reward.models.classifier import ModelCaller

        caller = ModelCaller(backend, CallMetrics(metrics))
    return CallPool(caller, program.slots, program.timeout_seconds, on_idle=on_idle)
