"""The choice of the replica for the next request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.replicas.fleet import Affinity, Fleet


def fleet_of(*addresses, **settings):
    fleet = Fleet(**settings)
    fleet.observe_addresses(addresses)
    return fleet


def test_least_loaded_replica_is_picked():
    fleet = fleet_of("a", "b", "c")
    assert sorted(fleet.pick(0.0) for _ in range(3)) == ["a", "b", "c"]
    fleet.record_done("b")
    assert fleet.pick(0.0) == "b"


def test_light_load_is_spread():
    fleet = fleet_of("a", "b")
    picked = []
    for _ in range(4):
        picked.append(fleet.pick(0.0))
        fleet.record_done(picked[-1])
    assert sorted(picked) == ["a", "a", "b", "b"], "not always the first"


def test_light_load_stays_on_one_replica_that_works_if_requests_continue_each_other():
    fleet = fleet_of("a", "b", spreads=False)
    for _ in range(3):
        assert fleet.pick(0.0) == "a"
        fleet.record_done("a")
    fleet.pick(0.0)
    fleet.record_failed("a", 0.0)
    assert fleet.pick(0.0) == "b"


def test_turns_follow_the_prefix_of_their_episode_or_their_group():
    fleet, group = fleet_of("a", "b", "c"), Affinity()
    first, second = Affinity(group), Affinity(group)
    for affinity in (first, second, first):
        assert fleet.pick(0.0, affinity=affinity) == "a", "others have fewer requests"
    assert fleet.pick(0.0, affinity=Affinity(Affinity())) == "b", "another group"
    assert fleet.num_picked == {"new": 2, "hit": 2}


def test_prefix_is_not_followed_to_a_replica_with_many_more_requests_than_the_mean():
    fleet, group = fleet_of("a", "b"), Affinity()
    picked = [fleet.pick(0.0, affinity=Affinity(group)) for _ in range(100)]
    assert 50 < picked.count("a") <= 1.25 * 50 + 5
    assert fleet.num_picked.total() == 100
    assert fleet.num_picked["spilled"] == picked.count("b")


def test_spilled_episode_stays_where_it_went():
    fleet, group = fleet_of("a", "b"), Affinity()
    episodes = [Affinity(group) for _ in range(100)]
    for episode in episodes:
        fleet.pick(0.0, affinity=episode)
    assert episodes[-1].address == "b"
    for _ in range(50):
        fleet.record_done("a")
    assert fleet.pick(0.0, affinity=episodes[-1]) == "b", "it has the episode's tokens, and a the prompt alone"
    assert group.address == "a"


def test_prefix_of_a_replica_that_failed_or_left_is_not_waited_for():
    fleet, group = fleet_of("a", "b"), Affinity()
    episode = Affinity(group)
    assert fleet.pick(0.0, affinity=episode) == "a"
    fleet.record_failed("a", 0.0)
    assert fleet.pick(0.0, affinity=episode) == "b"
    fleet.observe_addresses(["b"])
    assert fleet.pick(0.0, affinity=Affinity(group)) == "b"
    assert fleet.num_picked == {"new": 2, "spilled": 1}
    assert group.address == "b"


def test_retry_elsewhere_is_not_a_hit():
    fleet, episode = fleet_of("a", "b"), Affinity()
    assert fleet.pick(0.0, affinity=episode) == "a"
    assert fleet.pick(0.0, avoid={"a"}, affinity=episode) == "b"
    assert fleet.num_picked == {"new": 1, "spilled": 1}


@given(st.integers(2, 8), st.lists(st.integers(0, 9), max_size=60))
def test_replicas_that_join_and_leave_move_only_the_prefixes_of_those_that_leave(number, groups):
    names = [f"r{index}" for index in range(number)]
    fleet, known = fleet_of(*names), {group: Affinity() for group in range(10)}

    def play(group):
        address = fleet.pick(0.0, affinity=Affinity(known[group]))
        fleet.record_done(address)
        return address

    before = {group: play(group) for group in groups}
    fleet.observe_addresses([*names[1:], "new"])
    for group, address in before.items():
        assert play(group) == address or address == names[0]


def test_retry_prefers_another_replica():
    fleet = fleet_of("a", "b")
    assert fleet.pick(0.0, avoid={"a"}) == "b"
    assert fleet_of("a").pick(0.0, avoid={"a"}) == "a"


def test_full_replica_gets_no_request():
    fleet = fleet_of("a", max_in_flight=2)
    assert [fleet.pick(0.0) for _ in range(3)] == ["a", "a", None]


def test_failed_replica_backs_off_and_then_gets_one_request_at_a_time():
    fleet = fleet_of("a")
    fleet.pick(0.0)
    fleet.record_failed("a", 0.0)
    assert fleet.pick(0.1) is None
    assert fleet.pick(1.0) == "a"
    assert fleet.pick(1.0) is None, "one probe, not a stampede"
    fleet.record_done("a")
    assert [fleet.pick(1.0), fleet.pick(1.0)] == ["a", "a"]


def test_burst_of_failures_counts_as_one():
    fleet = fleet_of("a")
    for _ in range(100):
        fleet.pick(0.0)
    for _ in range(100):
        fleet.record_failed("a", 0.0)
    assert fleet.pick(0.5) == "a", "a hundred requests on a replica that died once must not each double its backoff"


def test_busy_replica_is_not_suspect():
    fleet = fleet_of("a")
    fleet.pick(0.0)
    fleet.record_busy("a", until=2.0)
    assert fleet.pick(1.0) is None
    assert [fleet.pick(2.0), fleet.pick(2.0)] == ["a", "a"]


def test_only_replicas_with_the_required_weights_are_used():
    fleet = fleet_of("a", "b")
    fleet.required_key = "g:1"
    fleet.record_serves("a", "g:1")
    assert fleet.pick(0.0) == fleet.pick(0.0) == "a"
    assert fleet.list_unverified(0.0) == ["b"]
    fleet.required_key = "g:2"
    assert fleet.pick(0.0) is None


def test_failed_replica_must_report_its_weights_again():
    fleet = fleet_of("a")
    fleet.required_key = "g:1"
    fleet.record_serves("a", "g:1")
    fleet.pick(0.0)
    fleet.record_failed("a", 0.0)
    assert fleet.pick(10.0) is None, "it may have restarted with the start model"
    assert fleet.list_unverified(10.0) == ["a"]
    fleet.record_serves("a", "g:1")
    assert fleet.pick(10.0) == "a"


def test_rejected_replica_is_not_verified_again_for_that_version():
    fleet = fleet_of("a")
    fleet.required_key = "g:1"
    fleet.record_rejected("a", "g:1")
    assert fleet.list_unverified(0.0) == []
    assert fleet.stragglers() == []
    fleet.required_key = "g:2"
    assert fleet.list_unverified(0.0) == ["a"]


def test_unlisted_replica_is_used_until_it_fails():
    fleet = fleet_of("a")
    fleet.observe_addresses([])
    assert fleet.pick(0.0) == "a", "readiness lags behind a weight update"
    fleet.record_failed("a", 0.0)
    assert fleet.replicas == {}


def test_draining_replica_gets_no_request_and_is_removed_when_idle():
    fleet = fleet_of("a", "b", max_in_flight=1)
    assert fleet.pick(0.0) == "a"
    fleet.observe_addresses(["b"])
    assert fleet.pick(0.0) == "b"
    assert fleet.pick(0.0) is None, "b is full; a must not get one more"
    assert fleet.replicas["a"].in_flight == 1, "it may finish its request"
    fleet.record_done("a")
    fleet.observe_addresses(["b"])
    assert list(fleet.replicas) == ["b"]


def test_draining_replica_is_used_when_no_other_works():
    fleet = fleet_of("a", "b")
    fleet.pick(0.0, avoid={"b"})
    fleet.observe_addresses(["b"])
    fleet.record_suspect("b", 0.0)
    assert fleet.pick(0.1) == "a", "b has failed"


def test_unlisted_replica_is_used_again_when_it_serves_the_required_weights():
    fleet = fleet_of("a", "b")
    fleet.required_key = "g:2"
    fleet.record_serves("a", "g:2")
    fleet.observe_addresses(["a"])
    fleet.record_serves("b", "g:2")
    assert {fleet.pick(0.0), fleet.pick(0.0)} == {"a", "b"}


def test_draining_replica_is_not_a_straggler():
    fleet = fleet_of("a", "b")
    fleet.required_key = "g:1"
    for address in "ab":
        fleet.record_serves(address, "g:1")
    fleet.pick(0.0, avoid={"b"})
    fleet.observe_addresses(["b"])
    fleet.required_key = "g:2"
    assert fleet.stragglers() == ["b"]


def test_success_ends_the_failing_period():
    fleet = fleet_of("a", "b")
    fleet.record_suspect("a", 5.0, "first")
    since = fleet.health.failing_since
    fleet.record_suspect("b", 6.0, "second")
    assert since is not None
    assert (fleet.health.failing_since, fleet.health.last_error) == (since, "second")
    fleet.pick(20.0)
    fleet.record_done("a")
    assert fleet.health.failing_since is None
    assert fleet.health.has_answered


def test_progress_of_a_long_request_ends_the_failing_period():
    fleet = fleet_of("a", "b")
    fleet.pick(0.0)
    fleet.record_suspect("b", 5.0)
    fleet.record_progress("a", 6.0)
    assert fleet.health.failing_since is None, "its end may be many minutes away"


@pytest.mark.parametrize(
    ("others", "is_awaited", "is_failing"),
    [([], True, True), ([], False, False), (["idle"], True, True), (["idle"], False, False), (["works"], True, False)],
)
def test_service_is_away_while_nothing_that_may_succeed_is_under_way(others, is_awaited, is_failing):
    fleet = fleet_of("failed", *others)
    if others == ["works"]:
        fleet.pick(0.0, avoid={"failed"})
    fleet.record_suspect("failed", 0.0)
    fleet.judge_health(is_awaited=is_awaited)
    assert (fleet.health.failing_since is not None) == is_failing


def test_wait_is_a_failure_without_a_replica_and_none_with_an_outdated_one():
    fleet = fleet_of()
    fleet.judge_health(is_awaited=True)
    assert fleet.health.last_error == "no replica exists"
    fleet = fleet_of("a")
    fleet.required_key = "g:2"
    fleet.judge_health(is_awaited=True)
    assert fleet.health.failing_since is None, "it loads the weights, or another version of a reward is pinned soon"


def test_answer_without_a_result_ends_the_failing_period_and_proves_no_success():
    fleet = fleet_of("a")
    fleet.record_suspect("a", 0.0)
    fleet.pick(20.0)
    fleet.record_answered("a")
    assert (fleet.health.failing_since, fleet.health.has_answered) == (None, False)
    assert (fleet.replicas["a"].num_failures, fleet.replicas["a"].in_flight) == (0, 0)


def test_silent_request_makes_only_a_silent_replica_suspect():
    fleet = fleet_of("a")
    for _ in range(3):
        fleet.pick(0.0)
    fleet.record_progress("a", 650.0)
    fleet.record_silent("a", 700.0, 600)
    assert fleet.replicas["a"].num_failures == 0, "it serves others, with a long queue"
    assert fleet.replicas["a"].in_flight == 2
    fleet.record_silent("a", 1_300.0, 600)
    assert fleet.replicas["a"].num_failures == 1
    assert fleet.replicas["a"].in_flight == 1


def test_updated_replica_is_healthy_and_must_report_its_weights_again():
    fleet = fleet_of("a")
    fleet.required_key = "g:1"
    fleet.record_serves("a", "g:1")
    fleet.pick(0.0)
    fleet.record_updated("a")
    assert (fleet.replicas["a"].num_failures, fleet.replicas["a"].in_flight) == (0, 0)
    assert fleet.pick(0.0) is None
    assert fleet.list_unverified(0.0) == ["a"]


EVENTS = st.lists(st.tuples(st.sampled_from("pdfbulsn"), st.sampled_from("abc"), st.floats(0, 3)), max_size=60)


@given(events=EVENTS)
def test_load_stays_between_zero_and_the_limit(events):
    fleet = fleet_of("a", "b", "c", max_in_flight=2)
    now, open_requests = 0.0, []
    for kind, address, seconds in events:
        now += seconds
        if kind == "p" and (picked := fleet.pick(now)):
            open_requests.append(picked)
        elif kind == "l":
            fleet.observe_addresses([address])
        elif open_requests:
            ended = open_requests.pop()
            records = {
                "d": (fleet.record_done,),
                "u": (fleet.record_unused,),
                "b": (fleet.record_busy, now + 1),
                "s": (fleet.record_silent, now, 2.0),
                "n": (fleet.record_updated,),
            }
            record, *rest = records.get(kind, (fleet.record_failed, now))
            record(ended, *rest)
        assert all(0 <= replica.in_flight <= 2 for replica in fleet.replicas.values())
