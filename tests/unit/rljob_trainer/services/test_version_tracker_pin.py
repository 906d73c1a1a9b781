"""Which version of a reward scores a collection."""

from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.replicas.fleet import Fleet
from rljob_trainer.services.version_tracker import ABSENT_SECONDS, PENDING, UNKNOWN_VERSION, VersionPin, choose_version

VERSIONS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=6)


def test_version_of_most_replicas_is_chosen_and_the_newest_on_a_tie():
    assert choose_version(["a", "a", "b"]) == "a"
    assert choose_version(["a", "b"]) == choose_version(["b", "a", "a", "b"]) == "b"
    assert choose_version([]) is None


def test_new_version_is_not_pinned_while_the_old_one_has_a_replica():
    pin = VersionPin()
    pin.begin(["a", "a"])
    assert not any(pin.observe(["a", "b", "b", "b"], now) for now in range(100))
    assert pin.version == "a"
    pin.begin(["a", "b", "b", "b"])
    assert pin.version == "b", "the next collection takes it"


def test_new_version_is_pinned_after_the_old_one_is_absent_long_enough():
    pin = VersionPin()
    pin.begin(["a"])
    assert not pin.observe(["b"], 10.0)
    assert not pin.observe(["a", "b"], 11.0), "it returned, so the time restarts"
    assert not pin.observe(["b"], 12.0)
    assert not pin.observe(["b"], 12.0 + ABSENT_SECONDS / 2)
    assert pin.observe(["b"], 12.0 + ABSENT_SECONDS)
    assert pin.version == "b"


def test_pin_stays_without_any_replica():
    pin = VersionPin()
    pin.begin(["a"])
    assert not any(pin.observe([], now) for now in range(100)), "DNS fails, or the reward is scaled to zero"
    assert pin.version == "a"


def test_first_reported_version_is_pinned_immediately():
    pin = VersionPin()
    pin.begin([])
    assert pin.observe(["a"], 0.0)
    assert pin.version == "a"


@given(begin=VERSIONS, then=st.lists(st.tuples(VERSIONS, st.floats(0, 5)), max_size=30))
def test_pin_moves_only_to_a_served_version_and_from_an_absent_one(begin, then):
    pin, now, absent_since = VersionPin(), 0.0, None
    pin.begin(begin)
    for versions, seconds in then:
        now += seconds
        before = pin.version
        is_absent = bool(versions) and before not in versions
        absent_since = (now if absent_since is None else absent_since) if is_absent else None
        moved = pin.observe(versions, now)
        assert moved == (pin.version != before)
        if moved:
            assert pin.version in versions
            assert before is None or now - absent_since >= ABSENT_SECONDS
            absent_since = None
        assert pin.version is None or pin.accepts(pin.version)
        assert all(not pin.accepts(other) for other in "abc" if pin.version not in (None, other))


def test_result_without_a_version_counts():
    pin = VersionPin()
    pin.begin(["a"])
    assert (pin.accepts("a"), pin.accepts(""), pin.accepts("b")) == (True, True, False)
    pin.begin([UNKNOWN_VERSION])
    assert pin.accepts("b"), "its server reports none"


def test_only_replicas_of_the_required_version_are_picked():
    fleet = Fleet(readiness_lags=False)
    fleet.observe_addresses(["x", "y"])
    fleet.required_key = PENDING
    assert fleet.pick(0.0) is None, "no replica has reported a version"
    assert sorted(fleet.list_unidentified(0.0)) == ["x", "y"]
    fleet.record_version("x", "a")
    fleet.record_version("y", "b")
    fleet.required_key = "a"
    assert [fleet.pick(0.0), fleet.pick(0.0)] == ["x", "x"]
    assert sorted(fleet.versions()) == ["a", "b"]


def test_failed_replica_is_identified_again_and_stays_suspect():
    fleet = Fleet(readiness_lags=False)
    fleet.observe_addresses(["x"])
    fleet.record_version("x", "a")
    fleet.required_key = "a"
    fleet.pick(0.0)
    fleet.record_failed("x", 0.0)
    assert (fleet.list_unidentified(0.0), fleet.list_unidentified(10.0)) == ([], ["x"])
    fleet.record_version("x", "a")
    assert [fleet.pick(10.0), fleet.pick(10.0)] == ["x", None], "one request, until it succeeds"


def test_address_with_a_new_version_counts_as_a_new_replica():
    fleet = Fleet(readiness_lags=False)
    fleet.observe_addresses(["x"])
    fleet.record_version("x", "a")
    fleet.observe_addresses(["x", "y"])
    fleet.record_version("y", "a")
    fleet.record_version("x", "b")
    assert fleet.versions() == ["a", "b"]


def test_leaving_replicas_count_only_when_discovery_lists_none():
    fleet = Fleet(readiness_lags=False)
    fleet.observe_addresses(["x", "y"])
    fleet.record_version("x", "a")
    fleet.record_version("y", "b")
    fleet.pick(0.0, avoid={"y"})
    fleet.observe_addresses(["y"])
    assert fleet.versions() == ["b"], "x drains"
    fleet.observe_addresses([])
    assert sorted(fleet.versions()) == ["a", "b"], "the name server may have failed"
