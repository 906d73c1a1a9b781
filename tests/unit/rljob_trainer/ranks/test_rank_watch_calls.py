"""Ranks are asked one question at a time."""

import asyncio
import gc
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rljob_api.manifest.job_sections import HangDetection
from rljob_trainer.liveness.judge import Beat, Judge, Pace
from rljob_trainer.ranks import rank_watch as calls
from rljob_trainer.ranks.rank_watch import Heartbeats, RankWatch


class Rank:
    """An actor whose answers the test gives."""

    def __init__(self):
        self.questions: list[Future] = []
        self.beat = SimpleNamespace(remote=self._ask)

    def _ask(self):
        self.questions.append(Future())
        return SimpleNamespace(future=lambda question=self.questions[-1]: question)


@pytest.fixture
def ranks():
    return [Rank(), Rank()]


@pytest.fixture
def watch():
    return RankWatch(Judge(Pace(HangDetection()), 0.0))


@pytest.fixture
def heartbeats(monkeypatch, watch):
    monkeypatch.setattr(calls, "_ANSWER_SECONDS", 0.01)
    return Heartbeats(watch)


async def test_a_silent_rank_is_not_asked_again(heartbeats, ranks):
    for _ in range(3):
        await heartbeats.ask(ranks)
    ranks[0].questions[0].set_result(Beat(3))
    for _ in range(3):
        assert await heartbeats.ask(ranks) == []
    assert [len(rank.questions) for rank in ranks] == [2, 1]


async def test_an_answer_between_two_rounds_counts(heartbeats, ranks, watch):
    await heartbeats.ask(ranks)
    for second in range(1, 31):
        watch.judge.tick(float(second))
    ranks[0].questions[0].set_result(Beat(3))
    await asyncio.sleep(0.01)
    await heartbeats.ask(ranks)
    assert [watch.silence(rank) for rank in (0, 1)] == [0, 30]


async def test_a_dead_rank_is_an_error_and_what_is_not_read_is_not_logged(heartbeats, ranks, caplog):
    await heartbeats.ask(ranks)
    error = ValueError("died")
    ranks[1].questions[0].set_exception(error)
    await asyncio.sleep(0.01)
    assert await heartbeats.ask(ranks) == [error]
    ranks[1].questions[1].set_exception(error)
    await asyncio.sleep(0.01)
    del heartbeats
    gc.collect()
    assert "never retrieved" not in caplog.text
