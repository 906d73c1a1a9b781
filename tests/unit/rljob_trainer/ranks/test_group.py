"""The pure parts of the group; tests/integration/test_trainer_group_real.py runs the rest on Ray."""

from types import SimpleNamespace

from rljob_api.manifest.job import RLJob
from rljob_trainer.ranks.actor import RankProcess
from rljob_trainer.ranks.group import TrainerGroup


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
