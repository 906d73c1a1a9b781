"""The pure parts of the group; tests/integration/test_trainer_group_real.py runs the rest on Ray."""

from types import SimpleNamespace

import numpy as np
import pytest

from rljob_api.manifest.job import RLJob
from rljob_trainer.episodes.types import NOT_SAMPLED, TrainRow, UpdateVersions
from rljob_trainer.ranks.actor import RankProcess
from rljob_trainer.ranks.group import TrainerGroup


def job_of(**algorithm):
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t"}},
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
        "algorithm": algorithm,
    }
    return RLJob.model_validate({"metadata": {"name": "t"}, "spec": spec})


async def test_set_steps_reaches_the_learning_rate_of_every_rank(monkeypatch):
    ranks = [SimpleNamespace(policy=SimpleNamespace(num_steps=3)) for _ in range(2)]

    async def call_all(self, method, arguments):
        return [getattr(RankProcess, method)(rank, *given) for rank, given in zip(ranks, arguments, strict=True)]

    monkeypatch.setattr(TrainerGroup, "_call_all", call_all)
    group = TrainerGroup(job_of(), "g", ranks)
    await group.set_steps(10)
    assert [rank.policy.num_steps for rank in ranks] == [10, 10]


@pytest.mark.parametrize(("algorithm", "trains"), [("grpo", False), ("ppo", True)])
async def test_rows_without_advantage_train_a_critic(monkeypatch, algorithm, trains):
    sent = []

    async def send(self, method, plans):
        sent.append((method, plans))

    monkeypatch.setattr(TrainerGroup, "_send", send)
    mask, zeros = np.array([False, True]), np.zeros(2, np.float32)
    row = TrainRow(np.array([1, 2]), mask, zeros, zeros, np.array([NOT_SAMPLED, 0], np.int32))
    await TrainerGroup(job_of(type=algorithm), "g", []).accumulate([row], UpdateVersions(0, 0, 1))
    assert [method for method, _ in sent] == ["accumulate"] * trains
