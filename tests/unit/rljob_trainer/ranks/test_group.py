"""The pure parts of the group; tests/integration/test_trainer_group_real.py runs the rest on Ray."""

from types import SimpleNamespace

import pytest

from rljob_api.manifest.job import RLJob
from rljob_trainer.episodes.types import TrainSample
from rljob_trainer.policy.micro_batches import plan_micro_batches
from rljob_trainer.policy.policy import RankMetrics
from rljob_trainer.ranks.actor import RankProcess
from rljob_trainer.ranks.group import TrainerGroup, scatter_logprobs, summarize_update


def test_logprobs_are_scattered_to_their_tokens():
    samples = [
        TrainSample([1, 2, 10, 11], [0, 0, 1, 1], [0.0] * 4, 1.0),
        TrainSample([1, 2, 12, 13, 14], [0, 0, 1, 0, 1], [0.0] * 5, 1.0),
        TrainSample([9, 15], [0, 1], [0.0] * 2, 1.0),
    ]
    plans = plan_micro_batches(samples, num_ranks=2, micro_batch_tokens=16)
    values = [[[-float(t) for t in batch.targets] for batch in plan.train] for plan in plans]
    assert scatter_logprobs(samples, plans, values) == [[0, 0, -10, -11], [0, 0, -12, 0, -14], [0, -15]]


async def test_set_steps_reaches_the_learning_rate_of_every_rank(monkeypatch):
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t"}},
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
    }
    ranks = [SimpleNamespace(policy=SimpleNamespace(num_steps=3)) for _ in range(2)]

    async def call_all(self, method, arguments):
        return [getattr(RankProcess, method)(rank, *given) for rank, given in zip(ranks, arguments, strict=True)]

    monkeypatch.setattr(TrainerGroup, "_call_all", call_all)
    group = TrainerGroup(RLJob.model_validate({"metadata": {"name": "t"}, "spec": spec}), "g", ranks)
    await group.set_steps(10)
    assert [rank.policy.num_steps for rank in ranks] == [10, 10]


def test_update_means_are_over_the_trained_tokens():
    sums = {"loss": 0.5, "policy_loss": 0.4, "kl": 2.0, "entropy": 8.0, "clipped": 1.0, "logprob_difference": 0.4}
    metrics = summarize_update(RankMetrics({**sums, "num_tokens": 4.0}, 0.7, 1e-6), 3, 2.0)
    assert (metrics.loss, metrics.kl, metrics.entropy, metrics.clip_fraction) == (0.5, 0.5, 2.0, 0.25)
    assert metrics.logprob_difference == pytest.approx(0.1)
    assert (metrics.num_tokens, metrics.num_micro_batches) == (4, 3)
