"""Which requests get a second one."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.reward import Hedging
from rljob_trainer.replicas.hedging import HedgeTracker, InFlightRequest


def make_out(sent_at, address="a"):
    return InFlightRequest(address, sent_at, None)


def warm(hedging=None, latencies=range(1, 101)):
    hedges = HedgeTracker(hedging or Hedging(percentile=90, max_percent=10))
    for latency in latencies:
        hedges.record_latency(float(latency))
    return hedges


def send(hedges, *sent_at):
    outs = [make_out(at) for at in sent_at]
    for out in outs:
        hedges.record_sent(out)
    return outs


def hedge_all(hedges, now):
    num = 0
    while (out := hedges.next_due(now)) is not None:
        hedges.record_hedged(out)
        num += 1
    return num


def test_nothing_is_hedged_before_enough_latencies_are_known():
    hedges = warm(latencies=range(19))
    send(hedges, *[0.0] * 100)
    assert hedges.next_due(1e9) is None
    hedges.record_latency(1.0)
    assert hedges.next_due(1e9) is not None


def test_a_request_is_due_once_it_is_out_for_longer_than_the_percentile():
    hedges = warm()
    assert hedges.threshold_seconds() == 90.0
    [oldest, *_] = send(hedges, *range(10))
    assert hedges.next_due(90.0) is None
    assert hedges.next_due(90.5) is oldest, "the one that is out longest"
    hedges.record_ended(oldest)
    assert hedges.next_due(90.5) is None


def test_a_request_is_hedged_once():
    hedges = warm(Hedging(percentile=90, max_percent=100))
    send(hedges, 0.0)
    hedges.record_hedged(hedges.next_due(1000.0))
    assert hedges.next_due(1000.0) is None


def test_a_reward_that_is_slow_as_a_whole_is_not_asked_for_twice_as_much():
    hedges = warm()
    send(hedges, *[0.0] * 1000)
    assert hedge_all(hedges, 1000.0) == 100, "a tenth of them"


def test_a_budget_that_was_not_used_does_not_grow_for_ever():
    hedges = warm()
    for out in send(hedges, *[0.0] * 100_000):
        hedges.record_ended(out)
    send(hedges, *[1.0] * 1000)
    assert hedge_all(hedges, 1000.0) <= 205, "a tenth of the newest 2,048"


EVENTS = st.lists(st.tuples(st.sampled_from("seh"), st.floats(0, 200)), max_size=200)


@given(events=EVENTS, percent=st.floats(1, 100))
def test_the_budget_holds_at_every_moment(events, percent):
    hedges, now, num_sent, num_hedged, outs = warm(Hedging(percentile=50, max_percent=percent)), 0.0, 0, 0, []
    for kind, seconds in events:
        now += seconds
        if kind == "s":
            outs += send(hedges, now)
            num_sent += 1
        elif kind == "e" and outs:
            hedges.record_ended(outs.pop())
        elif kind == "h" and (out := hedges.next_due(now)):
            assert now - out.sent_at > hedges.threshold_seconds()
            hedges.record_hedged(out)
            num_hedged += 1
        assert num_hedged <= num_sent * percent / 100 + 1e-6


# ---- with servers ----


async def warm_up(rewards, make_request, num=25):
    """Enough latencies, and a budget."""
    for i in range(num):
        await rewards.score(make_request(f"warm{i}", "1"))


async def test_the_slowest_request_is_asked_of_another_replica_and_the_first_valid_result_wins(reward_harness):
    from tests.support.reward_harness import make_request, make_reward, until

    slow, quick = await reward_harness.serve(), await reward_harness.serve()
    reward_harness.list(slow, quick)
    spec = make_reward(hedging={"percentile": 95, "maxPercent": 10})
    async with reward_harness.rewards(spec) as rewards:
        await until(lambda: len(rewards.clients["r"].replicas.fleet.replicas) == 2)
        await warm_up(rewards, make_request)
        slow.open.clear()
        found = []
        while not (hedges := rewards.clients["r"].hedges).num_wins:
            found.append((await rewards.score(make_request(len(found), "7")))["r"])
        assert all(result.score == 7.0 for result in found)
        assert found[-1].attempts == 2
        assert hedges.num_hedges >= hedges.num_wins == 1, "on a busy machine the quick one may be slow, too"
        await until(lambda: slow.num_left >= 1)  # the other one is cancelled: the server need not begin with it
        asked_slow, asked_quick = set(slow.asked), set(quick.asked)
        assert f"s{len(found) - 1}" in asked_slow & asked_quick, "with the same id"
        assert all(not replica.in_flight for replica in rewards.clients["r"].replicas.fleet.replicas.values())


async def test_nobody_is_hedged_while_somebody_waits_for_a_place(reward_harness):
    from tests.support.reward_harness import make_request, make_reward, until

    first, second = await reward_harness.serve(), await reward_harness.serve()
    reward_harness.list(first, second)
    spec = make_reward(slots=1, hedging={"percentile": 50, "maxPercent": 100})
    async with reward_harness.rewards(spec) as rewards, asyncio.TaskGroup() as tasks:
        client = rewards.clients["r"]
        await until(lambda: len(client.replicas.fleet.replicas) == 2)
        await warm_up(rewards, make_request)
        first.open.clear()
        second.open.clear()
        scored = [tasks.create_task(rewards.score(make_request(i, "1"))) for i in range(8)]
        await until(lambda: client.replicas.num_waiting >= 4)
        num_before = client.hedges.num_hedges
        await until(lambda: client.hedges.next_due(client.replicas.now()) is not None)
        for _ in range(5):
            client._tick()
        assert client.hedges.num_hedges == num_before
        first.open.set()
        second.open.set()
        await asyncio.gather(*scored)
