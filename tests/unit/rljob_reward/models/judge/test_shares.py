"""Shares of a limit: whatever replicas come, go and see, they never add up to more than the limit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_reward.models.judge.shares import ALONE, Share, Shares

DELAY = 3
"""D: look-ups show what was so at most that long ago."""
LEAVE = 10
NAMES = "abcde"


def make(name, delay=DELAY, leave=LEAVE):
    return Shares(name, propagation_seconds=delay, leave_seconds=leave)


@given(limit=st.integers(1, 100), count=st.integers(1, 50))
def test_portions_of_one_view_are_all_of_the_limit(limit, count):
    portions = [Share(rank, count).portion(limit) for rank in range(count)]
    assert sum(portions) == limit
    assert max(portions) - min(portions) <= 1


@settings(max_examples=60, deadline=None)
@given(data=st.data(), limit=st.integers(1, 20))
def test_replicas_that_know_each_other_by_hearsay_stay_within_the_limit(data, limit):
    """Time in seconds; each second each replica may look, and sees who was ready up to D seconds before, or nothing."""
    replicas = {name: make(name) for name in NAMES}
    history: list[set[str]] = [set()]
    most_holders = 0
    for now in range(60):
        ready = set(history[-1])
        for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=1), label="flips"):
            ready ^= {name}
        history.append(ready)
        for replica in replicas.values():
            age = data.draw(st.sampled_from([None, 0, 0, 1, DELAY]), label="age")
            if age is not None:
                replica.observe(sorted(history[max(0, len(history) - 1 - age)]), now)
        shares = [share for replica in replicas.values() if (share := replica.share(now))]
        most_holders = max(most_holders, len(shares))
        assert sum(share.portion(limit) for share in shares) <= limit
        assert sum(share.part(limit) for share in shares) <= limit * (1 + 1e-9)


def test_replicas_that_stay_get_all_of_the_limit_in_the_end():
    replicas = [make(name) for name in NAMES]
    for now in range(2 * DELAY + 1):
        for replica in replicas:
            replica.observe(sorted(NAMES), now)
    shares = [replica.share(now) for replica in replicas]
    assert sum(share.portion(7) for share in shares) == 7


def test_a_newcomer_takes_nothing_until_all_others_have_seen_it():
    newcomer = make("b")
    for now in range(2 * DELAY):
        newcomer.observe(["a", "b"], now)
        assert newcomer.share(now) is None
    newcomer.observe(["a", "b"], 2 * DELAY)
    assert newcomer.share(2 * DELAY) == Share(1, 2)


def test_who_has_left_is_counted_until_its_last_request_has_ended():
    stays = make("a")
    for now in range(2 * DELAY + 1):
        stays.observe(["a", "b"], now)
    left = now
    for now in range(left + 1, left + LEAVE + 2):
        stays.observe(["a"], now)
        expected = Share(0, 2) if now <= left + LEAVE else ALONE
        assert stays.share(now) == expected


def test_without_dns_a_share_is_held_for_a_while_and_then_given_up():
    replica = make("a")
    for now in range(2 * DELAY + 1):
        replica.observe(["a"], now)
    replica.observe([], now + DELAY)
    assert replica.share(now + DELAY) == ALONE
    assert replica.share(now + DELAY + 1) is None
    replica.observe(["a"], now + DELAY + 2)
    assert replica.share(now + DELAY + 2) is None, "what was in between, nobody knows"


def test_a_replica_that_is_not_ready_holds_nothing():
    replica = make("a")
    for now in range(2 * DELAY + 1):
        replica.observe(["a", "b"], now)
    replica.observe(["b"], now + 1)
    assert replica.share(now + 1) is None
