"""The pure parts of the group; what needs Ray is in tests/integration/test_trainer_group_real.py."""

import pytest
import torch
from ray.exceptions import RayActorError

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_sections import Algorithm
from rljob_trainer.episodes.types import TrainSample
from rljob_trainer.policy.micro_batches import plan_micro_batches
from rljob_trainer.policy.policy import Policy, PolicySettings, RankMetrics
from rljob_trainer.ranks.actor import _typed_errors
from rljob_trainer.ranks.errors import RankLostError, TrainerGroupDiedError
from rljob_trainer.ranks.group import (
    TrainerGroup,
    _typed_failure,
    scatter_logprobs,
    summarize_update,
)
from rljob_trainer.ranks.process_setup import choose_num_threads


def test_logprobs_return_to_where_their_tokens_are():
    samples = [
        TrainSample([1, 2, 10, 11], [0, 0, 1, 1], [0.0] * 4, 1.0),
        TrainSample([1, 2, 12, 13, 14], [0, 0, 1, 0, 1], [0.0] * 5, 1.0),
        TrainSample([9, 15], [0, 1], [0.0] * 2, 1.0),
    ]
    plans = plan_micro_batches(samples, num_ranks=2, micro_batch_tokens=16)
    values = [[[-float(t) for t in batch.targets] for batch in plan.train] for plan in plans]
    assert scatter_logprobs(samples, plans, values) == [[0, 0, -10, -11], [0, 0, -12, 0, -14], [0, -15]]


async def test_new_steps_reach_the_learning_rate_of_every_rank(monkeypatch):
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t"}},
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
        "schedule": {"steps": 3, "miniBatches": 2},
    }
    ranks = [Policy.__new__(Policy) for _ in range(2)]
    for rank in ranks:
        rank.settings = PolicySettings(model="/m", algorithm=Algorithm(), total_updates=6)

    async def call_all(self, method, arguments):
        return [getattr(rank, method)(*given) for rank, given in zip(ranks, arguments, strict=True)]

    monkeypatch.setattr(TrainerGroup, "_call_all", call_all)
    group = TrainerGroup(RLJob.model_validate({"metadata": {"name": "t"}, "spec": spec}), "g", ranks)
    await group.set_steps(10)
    assert [rank.settings.total_updates for rank in ranks] == [20, 20]


def test_means_are_over_the_tokens_that_counted():
    sums = {"loss": 0.5, "policy_loss": 0.4, "kl": 2.0, "entropy": 8.0, "clipped": 1.0, "logprob_difference": 0.4}
    metrics = summarize_update(RankMetrics({**sums, "num_tokens": 4.0}, 0.7, 1e-6), 3, 2.0)
    assert (metrics.loss, metrics.kl, metrics.entropy, metrics.clip_fraction) == (0.5, 0.5, 2.0, 0.25)
    assert metrics.logprob_difference == pytest.approx(0.1)
    assert (metrics.num_tokens, metrics.num_micro_batches) == (4, 3)


def test_a_mistake_of_the_job_outweighs_the_peers_that_it_took_along():
    mistake = UserError("lower microBatchTokens")
    assert _typed_failure("update", [RankLostError("gloo"), mistake]) is mistake


def test_a_lost_rank_is_the_groups_death_and_an_unknown_error_stays_what_it_is():
    assert isinstance(_typed_failure("update", [RayActorError(), RankLostError("gloo")]), TrainerGroupDiedError)
    bug = KeyError("x")
    assert _typed_failure("update", [RankLostError("gloo"), bug]) is bug


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234"), RankLostError),
        (torch.OutOfMemoryError("CUDA out of memory"), UserError),
        (RuntimeError("shapes cannot be multiplied"), RuntimeError),
    ],
)
def test_errors_get_their_type_before_they_cross_ray(raised, expected):
    def fail() -> None:
        raise raised

    with pytest.raises(expected) as caught:
        _typed_errors(fail)()
    assert type(caught.value) is expected


def test_ranks_of_one_machine_share_its_cores_unless_the_user_says_otherwise():
    assert choose_num_threads(8, 2, None) == 4
    assert choose_num_threads(2, 4, None) == 1
    assert choose_num_threads(2, 4, "3") == 3
