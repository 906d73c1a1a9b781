"""The actor that the head knows has the methods of a rank."""

from __future__ import annotations

import pickle

from ray import cloudpickle

from rljob_trainer.ranks import actor
from rljob_trainer.ranks.remote import GROUPS, METHODS, build_actor


class Rank:
    def publish(self, generation: str, version: int) -> str:
        return f"{generation}:{version}"


def test_actor_has_the_methods_of_a_rank():
    own = [name for name, each in vars(actor.RankProcess).items() if callable(each) and not name.startswith("_")]
    assert sorted(METHODS) == sorted(own)
    assert build_actor().__ray_metadata__.method_meta.concurrency_group_for_methods == GROUPS, (
        "others run in one thread"
    )


def test_actor_passes_calls_on_to_the_rank_of_its_process(monkeypatch):
    monkeypatch.setattr(actor, "RankProcess", Rank)
    sent = cloudpickle.dumps(build_actor().__ray_metadata__.modified_class)
    assert b"rljob_trainer.ranks.actor" in sent, "by name, in the process of the rank"
    created = pickle.loads(sent)()
    assert created.publish("g", 3) == "g:3"
    assert type(created).__name__ == "RankProcess", "the command line of its process begins so"
