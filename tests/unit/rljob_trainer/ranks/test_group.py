"""The pure parts of the group; tests/integration/test_trainer_group_real.py runs the rest on Ray."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from rljob_api.manifest.job import RLJob
from rljob_inputs.models.defaults import resolve_job
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.episodes.types import NOT_SAMPLED, TrainRow, UpdateVersions
from rljob_trainer.ranks import group as group_module
from rljob_trainer.ranks.actor import RankProcess
from rljob_trainer.ranks.group import TrainerGroup
from tests.support.waiting import DEADLINE_SECONDS


def job_of(**algorithm):
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t"}},
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
        "algorithm": algorithm,
    }
    return resolve_job(RLJob.model_validate({"metadata": {"name": "t"}, "spec": spec}), None)


async def test_what_may_change_reaches_every_rank(monkeypatch):
    ranks = [SimpleNamespace(policy=SimpleNamespace(spec=None)) for _ in range(2)]

    async def call_all(self, method, arguments):
        return [getattr(RankProcess, method)(rank, *given) for rank, given in zip(ranks, arguments, strict=True)]

    monkeypatch.setattr(TrainerGroup, "_call_all", call_all)
    group = TrainerGroup(job_of(), "g", ranks)
    spec = job_of().spec
    await group.follow(spec)
    assert [rank.policy.spec for rank in ranks] == [spec, spec]


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


async def test_a_group_without_ranks_has_ended(monkeypatch):
    group, killed = TrainerGroup(job_of(), "g", ["rank"]), []
    monkeypatch.setattr(group_module.ray, "kill", killed.append)

    async def has_lost_node(nodes, settle_seconds):
        return True

    monkeypatch.setattr(group_module, "has_lost_node", has_lost_node)
    ended = asyncio.create_task(group.wait_until_ended())
    await asyncio.sleep(0)
    assert not group.has_ended
    assert not ended.done()
    group._kill()
    with pytest.raises(TrainerGroupDiedError) as caught:
        await ended
    assert group.has_ended
    assert caught.value.lost_node, "a drain would count as a failure of the ranks"
    assert killed == ["rank"]


async def test_memory_of_all_ranks_adds_up(monkeypatch):
    async def call_all(self, method, arguments):
        return [(5, 2), (7, 3)] if method == "free" else [None, None]

    monkeypatch.setattr(TrainerGroup, "_call_all", call_all)
    group = TrainerGroup(job_of(), "g", [object(), object()])
    assert await group.free() == (12, 5)
    assert await group.restore() is None


async def test_devices_are_reserved_after_all_pods_have_joined_and_before_ranks_are_placed(monkeypatch):
    events = []

    async def record(event):
        events.append(event)

    monkeypatch.setattr(group_module, "connect", lambda: events.append("connect"))
    monkeypatch.setattr(group_module, "_wait_for_nodes", lambda *_: record("nodes"))
    monkeypatch.setattr(group_module, "find_trainer_nodes", frozenset)
    monkeypatch.setattr(group_module, "_place_ranks", lambda *_, **__: events.append("place") or [])
    monkeypatch.setattr(TrainerGroup, "_load", lambda *_: record("load"))
    await TrainerGroup.start(
        job_of(), model="/m", run=None, generation="g", checkpoint=None, report=lambda text: None,
        reserve=lambda: record("reserve"),
    )  # fmt: skip
    assert events == ["connect", "nodes", "reserve", "place", "load"]


class Calls:
    """A method of two ranks, which ends when the test says so."""

    def __init__(self, monkeypatch):
        self.futures, self.killed = [asyncio.Future(), asyncio.Future()], []
        monkeypatch.setattr(group_module, "future", lambda future: future)
        monkeypatch.setattr(group_module.ray, "kill", self.killed.append)
        self.ranks = [
            SimpleNamespace(publish=SimpleNamespace(remote=lambda *_, future=future: future)) for future in self.futures
        ]
        self.group = TrainerGroup(job_of(), "g", self.ranks)

    async def cancel(self):
        calling = asyncio.create_task(self.group.publish(1))
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.sleep(0)
        assert not calling.done()
        return calling


async def test_cancelled_call_ends_on_all_ranks_which_then_have_one_state(monkeypatch):
    calls = Calls(monkeypatch)
    calling = await calls.cancel()
    for future in calls.futures:
        future.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert calls.killed == []


@pytest.mark.parametrize("failure", [ValueError("a rank failed"), None], ids=["fails", "does not end"])
async def test_cancelled_call_that_does_not_end_well_ends_the_ranks(monkeypatch, failure):
    monkeypatch.setattr(group_module, "_FINISH_SECONDS", 0.01)
    calls = Calls(monkeypatch)
    calling = await calls.cancel()
    calls.futures[0].set_result(None)
    if failure is not None:
        calls.futures[1].set_exception(failure)
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert calls.killed == calls.ranks


class Ranks:
    """Two ranks of a group that hands weights over, and its calls."""

    def __init__(self, monkeypatch):
        self.calls, self.fails, self.running = [], False, 0
        self.given = asyncio.Event()
        monkeypatch.setattr(TrainerGroup, "_call_alone", lambda _, method, arguments: self._call(method, arguments))
        monkeypatch.setattr(TrainerGroup, "_watch_ranks", lambda *_, **__: asyncio.Event().wait())
        self.group = TrainerGroup(job_of(), "g", [])
        self.group._ranks, self.group._hands_over = [object(), object()], True

    async def _call(self, method, arguments):
        assert not self.running, "collectives of two calls would mix"
        self.running += 1
        await asyncio.sleep(0)
        self.running -= 1
        self.calls.append((method, *arguments[0]))
        self.given.set()
        if self.fails:
            raise TrainerGroupDiedError("a rank died")
        return [1, 0]


async def test_weights_are_given_once_and_again_to_engines_that_ask_later(monkeypatch):
    ranks = Ranks(monkeypatch)
    watching = asyncio.create_task(ranks.group.watch())
    await ranks.group.offer_weights()
    await asyncio.wait_for(ranks.given.wait(), DEADLINE_SECONDS)
    assert ranks.calls == [("give_weights", True)]
    ranks.given.clear()
    ranks.group._wanted.set()  # a heartbeat says that an engine waits
    await asyncio.wait_for(ranks.given.wait(), DEADLINE_SECONDS)
    await ranks.group.withdraw_weights()
    await ranks.group.withdraw_weights()
    assert ranks.calls == [("give_weights", True), ("give_weights", False), ("withdraw_weights",)]
    watching.cancel()


async def test_other_calls_run_between_hand_overs(monkeypatch):
    ranks = Ranks(monkeypatch)
    watching = asyncio.create_task(ranks.group.watch())
    await ranks.group.offer_weights()
    await asyncio.gather(*(ranks.group.follow(None) for _ in range(3)), ranks.given.wait())
    assert {call[0] for call in ranks.calls} == {"give_weights", "follow"}
    watching.cancel()


async def test_a_rank_that_dies_in_the_hand_over_ends_the_group(monkeypatch):
    ranks = Ranks(monkeypatch)
    ranks.fails = True
    await ranks.group.offer_weights()
    with pytest.raises(TrainerGroupDiedError, match="a rank died"):
        await asyncio.wait_for(ranks.group.watch(), DEADLINE_SECONDS)


async def test_ranks_that_write_a_file_hand_nothing_over(monkeypatch):
    ranks = Ranks(monkeypatch)
    ranks.group._hands_over = False
    await ranks.group.offer_weights()
    await ranks.group.withdraw_weights()
    assert not ranks.calls
