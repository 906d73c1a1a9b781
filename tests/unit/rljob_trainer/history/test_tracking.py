"""Trackers: one curve a component, and what the driver's /metrics counts while a step is under way."""

from prometheus_client.parser import text_string_to_metric_families

from rljob_trainer.episodes.types import ScoredResult, Trajectory
from rljob_trainer.history.metrics import flatten, summarize_scores
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.tracking import TensorBoard, Trackers


def trajectory(**results):
    return Trajectory(0, 0, 0, [1, 2], [0, 1], [0.0, -0.5], "", False, "g:0", results, 1.0)


def valid(score, latency=0.02, **components):
    return ScoredResult(id="x", valid=True, score=score, components=components, latency_seconds=latency)


def invalid(reason, **fields):
    return ScoredResult(id="x", valid=False, reason=reason, **fields)


def read(prometheus):
    """(name, labels) -> value, as a scraper reads them."""
    families = text_string_to_metric_families(prometheus.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(prometheus, name, **labels):
    return read(prometheus).get((name, tuple(sorted(labels.items()))))


def test_tensorboard_gets_one_curve_a_component_also_where_samples_differ_in_their_keys(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    samples = [trajectory(a=valid(1.0, exact=1.0), b=valid(0.5)), trajectory(a=valid(0.0), b=valid(0.5, steps=3.0))]
    tracker = TensorBoard(tmp_path)
    tracker.log("step", 1, flatten({"components": summarize_scores(samples)}))
    tracker.log("step", 2, flatten({"components": summarize_scores(samples[:1])}))
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    curves = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert curves == {
        "step/components/score": [1, 2],
        "step/components/a": [1, 2],
        "step/components/a/exact": [1, 2],
        "step/components/b": [1, 2],
        "step/components/b/steps": [1],
    }


def test_a_restart_takes_from_the_curves_what_is_done_again_and_no_more(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers([TensorBoard(tmp_path)])
    trackers.restart_at(0)
    for step in (1, 2, 3):
        trackers.log("step", step, {"reward": float(step)})
    trackers.restart_at(2)
    trackers.log("step", 3, {"reward": 30.0})
    trackers.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    found = [(event.step, event.value) for event in events.Scalars("step/reward")]
    assert found == [(1, 1.0), (2, 2.0), (3, 30.0)], "step 2 is in the checkpoint and is not done again"


def test_a_tracker_whose_server_is_down_does_not_spoil_the_end_of_a_job():
    class Broken:
        num_ends = 0

        def log(self, kind, step, numbers): ...

        def close(self):
            self.num_ends += 1
            raise ConnectionError

    broken = Broken()
    Trackers([broken, PrometheusMetrics()]).close()
    assert broken.num_ends == 1


def test_results_are_counted_by_reward_lane_and_outcome():
    prometheus = PrometheusMetrics()
    prometheus.record_scored("train", trajectory(a=valid(1.0), b=invalid("timeout", attempts=3, latency_seconds=40.0)))
    labels = {"reward": "a", "lane": "train", "outcome": "valid"}
    assert value(prometheus, "rljob_reward_latency_seconds_count", **labels) == 1
    labels = {"reward": "b", "lane": "train", "outcome": "timeout"}
    assert value(prometheus, "rljob_reward_latency_seconds_sum", **labels) == 40
    assert value(prometheus, "rljob_reward_invalid_total", reward="b", lane="train", reason="timeout") == 1
    assert value(prometheus, "rljob_sampled_tokens_total", lane="train") == 1


def test_an_invalid_result_is_in_no_score_histogram():
    prometheus = PrometheusMetrics()
    prometheus.record_scored("train", trajectory(a=invalid("exception")))
    assert not any(name.startswith("rljob_reward_score") for name, _ in read(prometheus))


def test_zero_and_one_have_buckets_of_their_own():
    prometheus = PrometheusMetrics()
    for score in (-0.01, 0.0, 0.0, 0.95, 1.0):
        prometheus.record_scored("eval", trajectory(a=valid(score, exact=score)))
    labels = {"reward": "a", "lane": "eval", "component": "exact"}
    edges = ("-0.001", "0.0", "0.999", "1.0")
    counts = [value(prometheus, "rljob_reward_score_bucket", le=edge, **labels) for edge in edges]
    assert counts == [1, 3, 4, 5]
    assert value(prometheus, "rljob_reward_score_accumulated", **labels) == 1.94, "the mean is to be had, too"


def test_ever_new_components_make_a_bounded_number_of_series():
    prometheus = PrometheusMetrics()
    for i in range(100):
        prometheus.record_scored("train", trajectory(a=valid(1.0, **{f"key{i}": 1.0})))
    components = {dict(labels)["component"] for name, labels in read(prometheus) if name == "rljob_reward_score_count"}
    assert len(components) == 33, "the score and 32 components"
    assert value(prometheus, "rljob_reward_score_count", reward="a", lane="train", component="score") == 100
    for step in range(10):
        means = {f"components/key{i}": 1.0 for i in range(100 * step, 100 * step + 100)}
        prometheus.log("step", step, means | {"grad_norm": 0.5})
    gauges = [name for name, _ in read(prometheus) if name.startswith("rljob_step_components_")]
    assert len(gauges) == 256
    assert value(prometheus, "rljob_step_grad_norm") == 0.5


async def test_the_driver_counts_what_it_scored_and_where_its_time_went(make_harness):
    async with make_harness(schedule={"steps": 2}) as harness:
        await harness.run()
    text = harness.prometheus
    assert value(text, "rljob_samples_total", lane="train") == 2 * 4 * 4
    assert value(text, "rljob_samples_total", lane="eval") == 2 * 4
    labels = {"reward": "correct", "lane": "train", "outcome": "valid"}
    assert value(text, "rljob_reward_latency_seconds_count", **labels) == 2 * 4 * 4
    assert value(text, "rljob_reward_score_count", reward="correct", lane="train", component="exact") == 2 * 4 * 4
    assert value(text, "rljob_reward_invalid_total", reward="correct", lane="eval", reason="timeout") == 0, (
        "what may come is there at 0, else its first event would have no rate"
    )
    assert value(text, "rljob_reward_in_flight", reward="correct") == 0
    assert value(text, "rljob_reward_attempts_total", reward="correct", lane="train") == 2 * 4 * 4
    assert value(text, "rljob_step_reward_versions_correct") == 1
    assert value(text, "rljob_reward_waiting", reward="correct") == 0
    assert value(text, "rljob_reward_waiting_oldest_seconds", reward="correct") == 0
    for name in ("hedges", "hedge_wins", "rescored"):
        assert value(text, f"rljob_reward_{name}_total", reward="correct") == 0, name
    for phase in ("generate", "update", "publish", "sync", "evaluate", "checkpoint"):
        assert value(text, "rljob_phase_seconds_total", phase=phase) > 0, phase
