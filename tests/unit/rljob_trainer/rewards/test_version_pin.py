"""Which version of a reward scores a collection."""

from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.replicas.fleet import Fleet
from rljob_trainer.rewards.version_pin import ABSENT_SECONDS, PENDING, UNKNOWN_VERSION, VersionPin, choose_version

VERSIONS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=6)


def test_what_most_replicas_serve_is_chosen_and_of_equals_the_newest():
    assert choose_version(["a", "a", "b"]) == "a"
    assert choose_version(["a", "b"]) == choose_version(["b", "a", "a", "b"]) == "b"
    assert choose_version([]) is None


def test_a_version_that_comes_in_the_middle_changes_nothing_while_the_old_one_has_a_replica():
    pin = VersionPin()
    pin.begin(["a", "a"])
    assert not any(pin.observe(["a", "b", "b", "b"], now) for now in range(100))
    assert pin.version == "a"
    pin.begin(["a", "b", "b", "b"])
    assert pin.version == "b", "the next collection takes it"


def test_the_new_version_is_pinned_once_the_old_one_has_been_gone_for_a_while():
    pin = VersionPin()
    pin.begin(["a"])
    assert not pin.observe(["b"], 10.0)
    assert not pin.observe(["a", "b"], 11.0), "it came back: the time begins anew"
    assert not pin.observe(["b"], 12.0)
    assert not pin.observe(["b"], 12.0 + ABSENT_SECONDS / 2)
    assert pin.observe(["b"], 12.0 + ABSENT_SECONDS)
    assert pin.version == "b"


def test_without_any_replica_the_pin_stays():
    pin = VersionPin()
    pin.begin(["a"])
    assert not any(pin.observe([], now) for now in range(100)), "DNS is gone, or it is scaled to zero"
    assert pin.version == "a"


def test_the_first_version_that_is_told_is_pinned_at_once():
    pin = VersionPin()
    pin.begin([])
    assert pin.observe(["a"], 0.0)
    assert pin.version == "a"


@given(begin=VERSIONS, then=st.lists(st.tuples(VERSIONS, st.floats(0, 5)), max_size=30))
def test_the_pin_moves_only_to_what_is_served_and_only_from_what_was_not_for_a_while(begin, then):
    pin, now, gone_since = VersionPin(), 0.0, None
    pin.begin(begin)
    for versions, seconds in then:
        now += seconds
        before = pin.version
        gone = bool(versions) and before not in versions
        gone_since = (now if gone_since is None else gone_since) if gone else None
        moved = pin.observe(versions, now)
        assert moved == (pin.version != before)
        if moved:
            assert pin.version in versions
            assert before is None or now - gone_since >= ABSENT_SECONDS
            gone_since = None
        assert pin.version is None or pin.accepts(pin.version)
        assert all(not pin.accepts(other) for other in "abc" if pin.version not in (None, other))


def test_a_result_that_names_no_version_counts():
    pin = VersionPin()
    pin.begin(["a"])
    assert (pin.accepts("a"), pin.accepts(""), pin.accepts("b")) == (True, True, False)
    pin.begin([UNKNOWN_VERSION])
    assert pin.accepts("b"), "its server told none"


def test_only_replicas_of_the_wanted_version_are_picked_and_the_others_stay_known():
    fleet = Fleet(readiness_lags=False)
    fleet.observe_addresses(["x", "y"])
    fleet.require(PENDING)
    assert fleet.pick(0.0) is None, "nobody has told a version"
    assert sorted(fleet.list_unidentified(0.0)) == ["x", "y"]
    fleet.record_version("x", "a")
    fleet.record_version("y", "b")
    fleet.require("a")
    assert [fleet.pick(0.0), fleet.pick(0.0)] == ["x", "x"]
    assert sorted(fleet.versions()) == ["a", "b"]


def test_a_replica_that_failed_is_asked_again_for_its_version_and_is_suspect_nevertheless():
    fleet = Fleet(readiness_lags=False)
    fleet.observe_addresses(["x"])
    fleet.record_version("x", "a")
    fleet.require("a")
    fleet.pick(0.0)
    fleet.record_failed("x", 0.0)
    assert (fleet.list_unidentified(0.0), fleet.list_unidentified(10.0)) == ([], ["x"])
    fleet.record_version("x", "a")
    assert [fleet.pick(10.0), fleet.pick(10.0)] == ["x", None], "one request, until it succeeds"


def test_an_address_with_a_new_version_is_as_good_as_a_new_replica():
    fleet = Fleet(readiness_lags=False)
    fleet.observe_addresses(["x"])
    fleet.record_version("x", "a")
    fleet.observe_addresses(["x", "y"])
    fleet.record_version("y", "a")
    fleet.record_version("x", "b")
    assert fleet.versions() == ["a", "b"]


def test_replicas_that_leave_count_only_when_discovery_names_nobody():
    fleet = Fleet(readiness_lags=False)
    fleet.observe_addresses(["x", "y"])
    fleet.record_version("x", "a")
    fleet.record_version("y", "b")
    fleet.pick(0.0, avoid={"y"})
    fleet.observe_addresses(["y"])
    assert fleet.versions() == ["b"], "x drains"
    fleet.observe_addresses([])
    assert sorted(fleet.versions()) == ["a", "b"], "a name server's trouble"
