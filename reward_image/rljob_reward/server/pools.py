"""Build the pool of a reward's kind. A server that runs a function imports neither models nor judges."""

from __future__ import annotations

from collections.abc import Callable

from rljob_api.errors import TransientError
from rljob_api.manifest.scorers import JudgeReward
from rljob_reward.server.metrics import Metrics
from rljob_reward.server.served_reward import ServedReward
from rljob_reward.slots import SlotPool
from rljob_reward.worker.settings import FunctionSettings
from rljob_reward.worker_pool.pool import WorkerPool


def build_pool(
    reward: ServedReward,
    metrics: Metrics,
    *,
    on_idle: Callable[[], None],
    on_fatal_error: Callable[[TransientError], None],
) -> SlotPool:
    """Return the pool of this reward's kind."""
    config, backend = reward.config, reward.backend
    if isinstance(backend, FunctionSettings):
        return WorkerPool(
            backend,
            config.slots,
            on_idle=on_idle,
            on_restart=metrics.record_restart,
            on_fatal_error=on_fatal_error,
        )
    from rljob_reward.models.backend import ModelBackend
    from rljob_reward.models.metrics import UpstreamMetrics
    from rljob_reward.models.model_slots import ModelSlotPool

    model: ModelBackend
    upstream_metrics = UpstreamMetrics(metrics.registry, config.name)
    if isinstance(backend, JudgeReward):
        from rljob_reward.models.judge.judge import Judge

        # With autoscaling, the largest number of Pods shares the endpoint's limits until they are counted.
        replicas = config.autoscaling.max_replicas if config.autoscaling else max(1, config.replicas)
        model = Judge(backend, config.slots, replicas, config.timeout_seconds, upstream_metrics)
    else:
        from rljob_reward.models.classifier import Classifier

        model = Classifier(backend, upstream_metrics)
    return ModelSlotPool(model, upstream_metrics, config.slots, config.timeout_seconds, on_idle=on_idle)
