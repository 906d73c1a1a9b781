"""Whether a trainer group has lost a Ray node; tests/integration/test_trainer_group_real.py has real ones."""

import pytest

from rljob_api.wire.contract import RAY_RESOURCE_TRAINER
from rljob_trainer.ranks import group as nodes
from rljob_trainer.ranks.group import find_trainer_nodes, has_lost_node, is_any_lost


def node(name, *, alive=True, trainer=True):
    return {"NodeID": name, "Alive": alive, "Resources": {RAY_RESOURCE_TRAINER: 1.0} if trainer else {"memory": 1.0}}


@pytest.mark.parametrize(
    ("found", "silent", "is_lost"),
    [
        ([node("a"), node("b"), node("head", trainer=False)], (), False),
        ([node("a"), node("b", alive=False)], (), True),
        ([node("a")], (), True),
        ([node("a"), node("b")], ("b",), True),  # killed: Ray does not know it yet
        ([node("a"), node("b"), node("c", alive=False)], ("c",), False),  # of an earlier group
    ],
)
def test_node_is_lost_if_ray_reports_it_or_its_raylet_does_not_listen(found, silent, is_lost):
    assert is_any_lost(frozenset("ab"), found, lambda node: node["NodeID"] not in silent) == is_lost


async def test_node_that_is_lost_shortly_after_its_rank_is_noticed(monkeypatch):
    answers = [[node("a")], [node("a", alive=False)]]
    monkeypatch.setattr(nodes.ray, "nodes", lambda: answers.pop(0))
    monkeypatch.setattr(nodes, "is_raylet_listening", lambda node: True)
    monkeypatch.setattr(nodes, "_POLL_SECONDS", 0.0)
    assert await has_lost_node(frozenset("a"))


async def test_rank_that_died_on_nodes_that_stay_has_lost_none(monkeypatch):
    monkeypatch.setattr(nodes.ray, "nodes", lambda: [node("a")])
    monkeypatch.setattr(nodes, "is_raylet_listening", lambda node: True)
    assert not await has_lost_node(frozenset("a"), settle_seconds=0.0)


def test_only_living_nodes_with_ranks_belong_to_the_group(monkeypatch):
    found = [node("a"), node("b", alive=False), node("head", trainer=False)]
    monkeypatch.setattr(nodes.ray, "nodes", lambda: found)
    assert find_trainer_nodes() == {"a"}
