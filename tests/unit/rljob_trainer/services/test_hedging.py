"""The choice of requests that get a second one."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.services.reward import Hedging
from rljob_trainer.services.hedging import HedgeTracker, InFlightRequest
from tests.support.reward_harness import make_request, make_reward, score_alone, until


def make_tracker(hedging=None, latencies=range(1, 101)):
    hedges = HedgeTracker(hedging or Hedging(percentile=90, max_percent=10))
    for latency in latencies:
        hedges.record_latency(float(latency))
    return hedges


def send(hedges, *sent_at):
    requests = [InFlightRequest("a", at, None) for at in sent_at]
    for request in requests:
        hedges.record_sent(request)
    return requests


def hedge_all(hedges, now):
    num = 0
    while (request := hedges.next_due(now)) is not None:
        hedges.record_hedged(request)
        num += 1
    return num


def test_no_request_is_hedged_before_enough_latencies_are_known():
    hedges = make_tracker(latencies=range(19))
    send(hedges, *[0.0] * 100)
    assert hedges.next_due(1e9) is None
    hedges.record_latency(1.0)
    assert hedges.next_due(1e9) is not None


def test_oldest_request_is_due_after_the_percentile():
    hedges = make_tracker()
    assert hedges.threshold_seconds() == 90.0
    [oldest, *_] = send(hedges, *range(10))
    assert hedges.next_due(90.0) is None
    assert hedges.next_due(90.5) is oldest, "the oldest"
    hedges.record_ended(oldest)
    assert hedges.next_due(90.5) is None


def test_request_is_hedged_once():
    hedges = make_tracker(Hedging(percentile=90, max_percent=100))
    send(hedges, 0.0)
    hedges.record_hedged(hedges.next_due(1000.0))
    assert hedges.next_due(1000.0) is None


def test_hedges_of_a_slow_reward_stay_within_the_budget():
    hedges = make_tracker()
    send(hedges, *[0.0] * 1000)
    assert hedge_all(hedges, 1000.0) == 100, "10%"


def test_unused_budget_is_bounded():
    hedges = make_tracker()
    for request in send(hedges, *[0.0] * 10_000):
        hedges.record_ended(request)
    send(hedges, *[1.0] * 1000)
    assert hedge_all(hedges, 1000.0) <= 205, "10% of the newest 2,048"


EVENTS = st.lists(st.tuples(st.sampled_from("seh"), st.floats(0, 200)), max_size=200)


@given(events=EVENTS, percent=st.floats(1, 100))
def test_budget_holds_after_every_event(events, percent):
    hedges = make_tracker(Hedging(percentile=50, max_percent=percent))
    now, num_sent, num_hedged, requests = 0.0, 0, 0, []
    for kind, seconds in events:
        now += seconds
        if kind == "s":
            requests += send(hedges, now)
            num_sent += 1
        elif kind == "e" and requests:
            hedges.record_ended(requests.pop())
        elif kind == "h" and (request := hedges.next_due(now)):
            assert now - request.sent_at > hedges.threshold_seconds()
            hedges.record_hedged(request)
            num_hedged += 1
        assert num_hedged <= num_sent * percent / 100 + 1e-6


async def warm_up(rewards, num=25):
    """Give the tracker enough latencies and a budget."""
    for i in range(num):
        await score_alone(rewards, make_request(f"warm{i}", "1"))


async def test_slowest_request_is_hedged_and_first_valid_result_wins(reward_harness):
    slow, quick = await reward_harness.serve(), await reward_harness.serve()
    reward_harness.list(slow, quick)
    spec = make_reward(hedging={"percentile": 95, "maxPercent": 100})
    async with reward_harness.rewards(spec) as rewards:
        await until(lambda: len(rewards.clients["r"].replicas.fleet.replicas) == 2)
        await warm_up(rewards)
        slow.open.clear()
        found = []
        while not (hedges := rewards.clients["r"].hedges).num_wins:
            found.append((await score_alone(rewards, make_request(len(found), "7")))["r"])
        assert all(result.score == 7.0 for result in found)
        assert found[-1].attempts == 2
        assert hedges.num_hedges >= hedges.num_wins == 1, "on a busy machine the quick one can be slow, too"
        await until(lambda: slow.num_left >= 1)  # the slow request is cancelled
        asked_slow, asked_quick = set(slow.asked), set(quick.asked)
        assert f"s{len(found) - 1}" in asked_slow & asked_quick, "with the same id"
        assert all(not replica.in_flight for replica in rewards.clients["r"].replicas.fleet.replicas.values())


async def test_no_request_is_hedged_while_others_wait_for_a_place(reward_harness):
    first, second = await reward_harness.serve(), await reward_harness.serve()
    reward_harness.list(first, second)
    spec = make_reward(slots=1, hedging={"percentile": 50, "maxPercent": 100})
    async with reward_harness.rewards(spec) as rewards, asyncio.TaskGroup() as tasks:
        client = rewards.clients["r"]
        await until(lambda: len(client.replicas.fleet.replicas) == 2)
        await warm_up(rewards)
        first.open.clear()
        second.open.clear()
        scored = [tasks.create_task(score_alone(rewards, make_request(i, "1"))) for i in range(8)]
        await until(lambda: client.replicas.num_waiting >= 4)
        num_before = client.hedges.num_hedges
        await until(lambda: client.hedges.next_due(client.replicas.now()) is not None)
        for _ in range(5):
            client._tick()
        assert client.hedges.num_hedges == num_before
        first.open.set()
        second.open.set()
        await asyncio.gather(*scored)
