"""The replicas that a reward needs: the arithmetic, and the rules of scaling up and down."""

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.scaling import Autoscaling, RewardScaling
from rljob_api.wire.driver_status import DriverStatus, RewardDemand
from rljob_core.backend import Demand
from rljob_core.plan.autoscale import ScalingPolicy, decide_replicas, derive_scaling_events, read_demand

NOW = datetime(2026, 1, 2, tzinfo=UTC)
FOREVER = 10_000


def policy(slots=16, **fields):
    return ScalingPolicy("r", Autoscaling.model_validate({"minReplicas": 0, "maxReplicas": 1000, **fields}), slots)


def reported(**fields):
    """A step of 5,120 samples that take 20.5 s on average and are needed within 251 s."""
    usual = {"samples": 5120, "is_open": True, "latency_seconds": 20.5, "latency_p95_seconds": 38.0}
    fields = usual | {"due_seconds": 251.0, "window_seconds": 251.0} | fields
    return RewardDemand(**({"expected": fields["samples"] if fields["is_open"] else 0} | fields))


def demand(job="a", **fields):
    return Demand(job, reported(**fields))


IDLE = Demand("a", RewardDemand())
UNKNOWN = Demand("a", None)


def at(seconds):
    return NOW + timedelta(seconds=seconds)


def having(replicas, **fields):
    return RewardScaling(name="r", replicas=replicas, last_scale_time=NOW, **fields)


# ---- the arithmetic ----


def test_slots_follow_littles_law():
    decided = decide_replicas(policy(utilization=1), [demand()], None, NOW)
    assert decided.slots == 419, "Little's law"
    assert decided.replicas == 27
    assert decided.message == "wants 27: 5120 samples x 20.5 s / 251 s = 419 slots of 16"


def test_record_has_the_inputs():
    record = decide_replicas(policy(), [demand()], None, NOW)
    assert (record.samples, record.latency_seconds, record.target_seconds) == (5120, 20.5, 251)
    assert (record.slots, record.replicas, record.last_scale_time) == (523, 33, NOW)
    assert record.message == "wants 33: 5120 samples x 20.5 s / 201 s = 523 slots of 16"


def test_target_seconds_override_the_measured_window():
    assert decide_replicas(policy(targetSeconds=100, utilization=1), [demand()], None, NOW).slots == 1050


def test_slots_never_exceed_samples():
    decided = decide_replicas(policy(), [demand(samples=64, window_seconds=0.0, due_seconds=10.0)], None, NOW)
    assert (decided.slots, decided.replicas) == (64, 4), "all samples arrive at once: one slot each"


def test_fast_calls_need_a_pod_too():
    fast = demand(samples=1, latency_seconds=0.0, window_seconds=100_000.0)
    assert decide_replicas(policy(), [fast], None, NOW).replicas == 1


def test_spare_replicas_are_added_while_there_is_demand():
    assert decide_replicas(policy(spareReplicas=2), [demand()], None, NOW).message.endswith("slots of 16, + 2 spare")
    assert decide_replicas(policy(spareReplicas=2), [demand()], None, NOW).replicas == 35
    assert decide_replicas(policy(spareReplicas=2), [IDLE], None, NOW).replicas == 0


def test_bounds_apply_and_are_named_in_the_message():
    decided = decide_replicas(policy(maxReplicas=8), [demand()], None, NOW)
    assert (decided.replicas, decided.message[-16:]) == (8, "maxReplicas is 8")
    decided = decide_replicas(policy(minReplicas=50), [demand()], None, NOW)
    assert (decided.replicas, decided.message[-17:]) == (50, "minReplicas is 50")


def test_changed_bounds_apply_at_once_and_larger_demand_beyond_them():
    assert decide_replicas(policy(maxReplicas=8), [demand()], having(33), NOW).replicas == 8
    assert decide_replicas(policy(minReplicas=10), [IDLE], having(2), NOW).replicas == 10
    assert decide_replicas(policy(minReplicas=10), [demand()], having(2), NOW).replicas == 33


def test_demands_of_several_jobs_add_up():
    decided = decide_replicas(policy(), [demand("a"), demand("b", samples=512), IDLE], None, NOW)
    assert decided.message == "wants 36: 2 jobs need 523 + 53 slots of 16"
    assert decided.samples == 5632


# ---- before and during a collection ----


def test_pods_are_requested_one_startup_time_before_the_collection():
    soon, chosen = demand(is_open=False, starts_in_seconds=50.0), policy(scaleDownAfterSeconds=10)
    assert decide_replicas(chosen, [soon], None, NOW, lead_seconds=60).replicas == 33
    assert decide_replicas(chosen, [soon], None, NOW, lead_seconds=40).replicas == 0


@pytest.mark.parametrize("missing", ["latency", "target"])
def test_one_pod_starts_before_anything_is_measured(missing):
    unmeasured = (
        ("latency_seconds", "latency_p95_seconds") if missing == "latency" else ("due_seconds", "window_seconds")
    )
    decided = decide_replicas(policy(), [demand(**dict.fromkeys(unmeasured))], None, NOW)
    assert decided.replicas == 1
    assert f"{missing} not measured yet" in decided.message
    assert getattr(decided, f"{missing}_seconds") is None


def test_record_is_used_until_the_driver_has_measured():
    first = demand(latency_seconds=None, latency_p95_seconds=None, due_seconds=None, window_seconds=None)
    taught = having(0, latency_seconds=20.5, target_seconds=251.0)
    assert decide_replicas(policy(), [first], taught, NOW).replicas == 33


def test_first_collection_uses_the_larger_of_measurement_and_record():
    guess = {"is_first": True, "latency_seconds": 4.0, "window_seconds": 60.0, "due_seconds": 60.0}
    taught = having(0, latency_seconds=20.5, target_seconds=251.0)
    assert decide_replicas(policy(), [demand(**guess)], taught, NOW).replicas == 33
    assert decide_replicas(policy(), [demand(**guess | {"latency_seconds": 41.0})], taught, NOW).replicas == 66


def test_oldest_request_bounds_the_latency_before_the_first_score():
    first = {"latency_seconds": None, "latency_p95_seconds": None, "in_flight": 100, "oldest_in_flight_seconds": 9.0}
    assert decide_replicas(policy(utilization=1), [demand(**first)], None, NOW).slots == math.ceil(5120 * 8 / 251)
    unserved = demand(**first, waiting=100)
    assert decide_replicas(policy(), [unserved], None, NOW).replicas == 1, "without a replica the age is waiting time"


def test_late_step_scales_up():
    late = demand(expected=4000, elapsed_seconds=151.0)
    decided = decide_replicas(policy(), [late], having(33), at(300))
    assert decided.replicas == 52, "4,000 samples in the remaining 100 s"
    assert "4000 samples still open x 20.5 s, late" in decided.message


def test_step_on_time_keeps_its_replicas():
    on_time = demand(expected=2500, elapsed_seconds=120.0)
    assert decide_replicas(policy(), [on_time], having(33), at(300)).replicas == 33


def test_late_step_waits_for_pods_that_are_starting():
    late = demand(expected=4000, elapsed_seconds=151.0)
    assert decide_replicas(policy(), [late], having(33), at(30), lead_seconds=60).replicas == 33


def test_hopelessly_late_step_needs_at_most_one_slot_per_sample():
    late = demand(expected=40, elapsed_seconds=900.0)
    assert decide_replicas(policy(), [late], having(33), at(3000)).replicas == 33, "more slots than samples do not help"


def test_runner_has_a_slot_for_each_episode_before_anything_is_measured():
    runner = replace(policy(), samples="episodes")
    unknown = {"latency_seconds": None, "due_seconds": None, "window_seconds": None}
    decided = decide_replicas(runner, [demand(samples=64, holds_slots=True, **unknown)], None, NOW)
    assert (decided.replicas, decided.message) == (4, "wants 4: 64 episodes at once = 64 slots of 16")


def test_target_seconds_let_a_runner_play_fewer_episodes_at_once():
    fields = {"samples": 64, "holds_slots": True, "latency_seconds": 10.0, "window_seconds": 10.0}
    fields |= {"latency_p95_seconds": 10.0}
    runner = policy(targetSeconds=40, utilization=1)
    assert decide_replicas(runner, [demand(**fields)], None, NOW).slots == 16
    assert decide_replicas(runner, [demand(**fields, elapsed_seconds=30)], None, at(FOREVER)).slots == 64, "late"
    unknown = fields | {"latency_seconds": None, "window_seconds": None, "due_seconds": None}
    assert decide_replicas(runner, [demand(**unknown)], None, NOW).replicas == 1, "to measure an episode"


def test_small_change_of_latency_changes_nothing():
    record = decide_replicas(policy(), [demand()], None, NOW)
    for latency in (19.0, 20.0, 21.0, 22.0):
        decided = decide_replicas(policy(), [demand(latency_seconds=latency)], record, at(10))
        assert decided == record, "nothing is written"


# ---- scaling down ----


def run(demands, last, seconds, chosen, step=2):
    """Decide every `step` seconds. Returns the record and when it last changed."""
    record, changed = last, None
    for passed in range(0, seconds, step):
        new = decide_replicas(chosen, demands, record, at(passed))
        changed = passed if new != record else changed
        record = new
    return record, changed


def test_all_replicas_are_removed_after_the_stabilization_window():
    assert run([IDLE], having(33), 300, policy())[0].replicas == 33
    record, changed = run([IDLE], having(33), 310, policy())
    assert (record.replicas, record.below_since, changed) == (0, None, 300)
    assert record.message == "wants 0: no samples expected"


def test_scale_down_keeps_the_measured_latency():
    over = Demand("a", RewardDemand(latency_seconds=1.0, window_seconds=40.0))
    last = having(33, latency_seconds=0.5, target_seconds=6.0)
    record, _ = run([over], last, 310, policy())
    assert (record.replicas, record.latency_seconds, record.target_seconds) == (0, 1.0, 40.0)


def test_short_pause_between_steps_writes_nothing():
    pause = demand(is_open=False, starts_in_seconds=200.0)
    assert run([pause], having(33), 150, policy())[0] == having(33)


def test_pause_that_ends_early_removes_nothing():
    pause = demand(is_open=False, starts_in_seconds=2000.0)
    record, _ = run([pause], having(33), 150, policy())
    assert (record.replicas, record.below_since) == (33, NOW)
    again = decide_replicas(policy(), [demand()], record, at(250))
    assert (again.replicas, again.below_since) == (33, None)


def test_scale_ups_are_limited_within_a_step():
    replicas, record = [], None
    for passed in range(0, 60, 2):
        slower = demand(latency_seconds=4.0 + passed)
        record = decide_replicas(policy(), [slower], record, at(passed), lead_seconds=60)
        replicas.append(record.replicas)
    assert sorted(replicas) == replicas
    assert len(set(replicas)) == 6, "the estimate grows all the time, and each scale-up emits an event"


def test_long_pause_removes_replicas_and_restores_them_in_time():
    chosen = policy(scaleDownAfterSeconds=60)
    replicas, record = [], having(33)
    for passed in range(0, 600, 2):
        pause = demand(is_open=False, starts_in_seconds=max(0.0, 500.0 - passed))
        record = decide_replicas(chosen, [pause], record, at(passed), lead_seconds=90)
        replicas.append(record.replicas)
    assert (replicas[20], replicas[40], replicas[240]) == (33, 0, 33)
    assert replicas.index(33, 100) * 2 == 410, "one startup time before the next collection"


def test_open_step_never_loses_replicas():
    small = demand(samples=64, elapsed_seconds=1.0)
    record, _ = run([small], having(33), FOREVER, policy(scaleDownAfterSeconds=10), step=50)
    assert record.replicas == 33


def test_scale_down_keeps_the_peak_of_the_window():
    chosen = policy(scaleDownAfterSeconds=10)
    record = decide_replicas(chosen, [demand(is_open=False, samples=2560)], having(33), at(0))
    record = decide_replicas(chosen, [demand(is_open=False, samples=640)], record, at(8))
    decided = decide_replicas(chosen, [demand(is_open=False, samples=640)], record, at(12))
    assert decided.replicas == 17
    assert decided.message == "wants 17: peak demand of the last 10 s (stabilization window)"


def test_overlapping_steps_scale_down_to_what_all_of_them_need():
    chosen = policy(scaleDownAfterSeconds=60)
    record = decide_replicas(chosen, [demand("a", elapsed_seconds=5.0)], having(66), at(0))
    old = [demand("a", elapsed_seconds=105.0), demand("b", samples=16)]
    assert decide_replicas(chosen, old, record, at(100)).replicas == 66, "the step of job a began with 66 replicas"
    new = [demand("a", elapsed_seconds=20.0), demand("b", samples=16)]
    assert decide_replicas(chosen, new, record, at(100)).replicas == 33


def test_silent_driver_changes_nothing():
    record, _ = run([UNKNOWN], having(33), FOREVER, policy(), step=50)
    assert record == having(33)
    assert decide_replicas(policy(), [UNKNOWN, demand("b", samples=10_240)], having(33), at(60)).replicas == 66, (
        "other jobs may scale up"
    )


def test_new_bounds_apply_immediately():
    assert decide_replicas(policy(maxReplicas=8), [demand()], having(33), NOW).replicas == 8
    assert decide_replicas(policy(minReplicas=40), [UNKNOWN], having(33), NOW).replicas == 40


def test_future_timestamps_delay_nothing():
    ahead = having(20).model_copy(update={"last_scale_time": at(86400)})
    assert decide_replicas(policy(), [demand()], ahead, at(60)).replicas == 33, "it does not wait for that time"
    sinking = ahead.model_copy(update={"below_since": at(86400), "below_peak": 5})
    record = decide_replicas(policy(), [IDLE], sinking, at(60))
    assert record.below_since == at(60)


# ---- properties ----

COUNTS = st.integers(0, 20_000)
SECONDS = st.floats(0, 2000, allow_nan=False)


@st.composite
def demands(draw):
    found = []
    for job in "abc"[: draw(st.integers(0, 3))]:
        samples = draw(COUNTS)
        fields = {
            "samples": samples,
            "expected": draw(st.integers(0, samples)),
            "is_open": draw(st.booleans()),
            "elapsed_seconds": draw(SECONDS),
            "starts_in_seconds": draw(SECONDS),
            "in_flight": draw(st.integers(0, samples)),
            "oldest_in_flight_seconds": draw(SECONDS),
        }
        for name in ("due_seconds", "window_seconds", "latency_seconds", "latency_p95_seconds"):
            fields[name] = draw(st.none() | SECONDS)
        found.append(Demand(job, draw(st.none() | st.just(RewardDemand(**fields)))))
    return found


POLICIES = st.builds(
    lambda least, more, slots, after, spares, utilization: policy(
        slots,
        minReplicas=least,
        maxReplicas=max(1, least + more),
        scaleDownAfterSeconds=after,
        spareReplicas=spares,
        utilization=utilization,
    ),
    *(st.integers(0, 50), st.integers(0, 100), st.integers(1, 64), st.integers(0, 600), st.integers(0, 5)),
    st.floats(0.1, 1),
)
STEPS = st.lists(st.tuples(demands(), st.integers(0, 400)), min_size=1, max_size=15)


def walk(chosen, steps):
    """Consecutive decisions with their inputs."""
    record, now = None, NOW
    for found, pause in steps:
        now += timedelta(seconds=pause)
        decided = decide_replicas(chosen, found, record, now)
        yield found, now, record, decided
        record = decided


@given(POLICIES, STEPS)
def test_decisions_stay_in_bounds_and_are_deterministic(chosen, steps):
    for found, now, record, decided in walk(chosen, steps):
        assert chosen.autoscaling.min_replicas <= decided.replicas <= chosen.autoscaling.max_replicas
        assert decide_replicas(chosen, found, record, now) == decided
        stored = RewardScaling.model_validate(decided.to_manifest())
        assert stored == decided, "the status has all fields"


@given(POLICIES, STEPS)
def test_single_job_never_loses_replicas_within_a_step(chosen, steps):
    for found, _, record, decided in walk(chosen, [(found[:1], pause) for found, pause in steps]):
        if record and found and (found[0].reported is None or found[0].reported.is_open):
            assert decided.replicas >= record.replicas


@given(POLICIES, demands(), COUNTS, st.floats(1, 10))
def test_more_demand_never_gives_fewer_replicas(chosen, found, more, slower):
    def grown(each):
        if each.reported is None:
            return each
        new = each.reported.model_copy(
            update={"samples": each.reported.samples + more, "expected": each.reported.expected + more}
        )
        if new.latency_seconds is not None:
            new.latency_seconds *= slower
        return Demand(each.job, new)

    less, much = (decide_replicas(chosen, some, having(3), at(3600)) for some in (found, list(map(grown, found))))
    assert much.replicas >= less.replicas
    assert much.slots >= less.slots


@given(POLICIES, STEPS)
def test_idle_reward_scales_to_the_minimum_and_then_writes_nothing(chosen, steps):
    *_, (_, now, _, decided) = walk(chosen, steps)
    record = decided
    for _ in range(4):
        now += timedelta(seconds=chosen.autoscaling.scale_down_after_seconds + 1)
        record = decide_replicas(chosen, [], record, now)
    assert record.replicas == chosen.autoscaling.min_replicas
    assert decide_replicas(chosen, [], record, now + timedelta(days=1)) == record


# ---- events and demands ----


def test_each_change_of_replicas_emits_one_event():
    before, after = having(3), having(33, message="wants 33: because")
    [event] = derive_scaling_events(before, after, "reward r")
    assert (event.reason, event.message) == ("ScaledUp", "reward r from 3 to 33 Pods: wants 33: because")
    assert derive_scaling_events(after, before, "reward r")[0].reason == "ScaledDown"
    assert derive_scaling_events(after, after, "reward r") == ()
    assert derive_scaling_events(None, after, "reward r") == (), "the first decision is not a change"


def test_demand_is_unknown_if_the_driver_is_silent():
    assert read_demand("a", None, "r") == UNKNOWN
    status = DriverStatus(demand={"r": reported()})
    assert read_demand("a", status, "r") == demand()
