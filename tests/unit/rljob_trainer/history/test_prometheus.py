"""The driver's /metrics during a step."""

from typing import ClassVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import CallResult
from rljob_trainer.episodes.types import ContextBreak, EpisodeEnd, EpisodeFailure, ScoredResult, ToolCall, Turn
from rljob_trainer.history.prometheus import PrometheusMetrics
from tests.support.episodes import episode
from tests.support.records import evaluation_record, step_record


def trajectory(**results):
    return episode(results=results, score=1.0)


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


def test_results_are_counted_by_reward_lane_and_outcome():
    prometheus = PrometheusMetrics()
    prometheus.record_scored("train", trajectory(a=valid(1.0), b=invalid("timeout", attempts=3, latency_seconds=40.0)))
    labels = {"reward": "a", "lane": "train", "outcome": "valid"}
    assert value(prometheus, "rljob_reward_latency_seconds_count", **labels) == 1
    labels = {"reward": "b", "lane": "train", "outcome": "timeout"}
    assert value(prometheus, "rljob_reward_latency_seconds_sum", **labels) == 40
    assert value(prometheus, "rljob_reward_invalid_total", reward="b", lane="train", reason="timeout") == 1
    assert value(prometheus, "rljob_sampled_tokens_total", lane="train") == 1


@pytest.mark.parametrize(
    ("result", "parts"),
    [
        ({"latency_seconds": 9.0, "queue_seconds": 2.0, "execute_seconds": 3.0}, (4.0, 2.0, 3.0, 0.0)),
        ({"latency_seconds": 9.0, "queue_seconds": 2.0, "execute_seconds": 3.0, "retries": 1}, (0.0, 2.0, 3.0, 4.0)),
        ({"latency_seconds": 9.0, "queue_seconds": 2.0, "execute_seconds": 3.0, "attempts": 2}, (4.0, 2.0, 3.0, 0.0)),
        ({"latency_seconds": 2.0, "queue_seconds": 1.0, "execute_seconds": 3.0}, (0.0, 0.0, 2.0, 0.0)),
    ],
)
def test_parts_of_a_latency_add_up_to_it(result, parts):
    prometheus = PrometheusMetrics()
    prometheus.record_scored("train", trajectory(a=valid(1.0).model_copy(update=result)))
    found = [
        value(prometheus, "rljob_reward_latency_part_seconds_sum", reward="a", lane="train", part=part)
        for part in ("wait", "queue", "execute", "retry")
    ]
    assert tuple(found) == parts
    assert sum(found) == result["latency_seconds"]


def test_result_is_late_by_the_timeout_of_its_own_reward():
    class Client:
        num_requests: ClassVar = {"train": 0, "eval": 0}

        def __init__(self, timeout_seconds):
            self.timeout_seconds = timeout_seconds

        def statistics(self):
            names = ("in_flight", "waiting", "waiting_oldest_seconds", "replicas", "hedges", "hedge_wins", "rescored")
            return dict.fromkeys(names, 0.0)

    prometheus = PrometheusMetrics()
    prometheus.register_rewards({"fast": Client(1), "slow": Client(60)})
    for seconds in (0.5, 20.0):
        result = valid(1.0).model_copy(update={"latency_seconds": seconds})
        prometheus.record_scored("train", trajectory(fast=result, slow=result))
    late = {name: value(prometheus, "rljob_reward_late_total", reward=name, lane="train") for name in ("fast", "slow")}
    assert late == {"fast": 1, "slow": 0}
    assert value(prometheus, "rljob_reward_timeout_seconds", reward="fast") == 1


def test_failure_with_a_score_is_counted_by_its_reason_and_in_the_score_histogram():
    prometheus = PrometheusMetrics()
    result = valid(-0.5).model_copy(update={"failed_as": InvalidReason.TIMEOUT})
    prometheus.record_scored("train", trajectory(a=result))
    labels = {"reward": "a", "lane": "train"}
    assert value(prometheus, "rljob_reward_scored_failures_total", reason="timeout", **labels) == 1
    assert value(prometheus, "rljob_reward_invalid_total", reason="timeout", **labels) is None
    assert value(prometheus, "rljob_reward_latency_seconds_count", outcome="timeout", **labels) == 1
    assert value(prometheus, "rljob_reward_score_count", component="score", **labels) == 1


def test_invalid_result_is_not_in_the_score_histogram():
    prometheus = PrometheusMetrics()
    prometheus.record_scored("train", trajectory(a=invalid("exception")))
    assert not any(name.startswith("rljob_reward_score") for name, _ in read(prometheus))


def test_zero_and_one_have_separate_buckets():
    prometheus = PrometheusMetrics()
    for score in (-0.01, 0.0, 0.0, 0.95, 1.0):
        prometheus.record_scored("eval", trajectory(a=valid(score, exact=score)))
    labels = {"reward": "a", "lane": "eval", "component": "exact"}
    edges = ("-0.001", "0.0", "0.999", "1.0")
    counts = [value(prometheus, "rljob_reward_score_bucket", le=edge, **labels) for edge in edges]
    assert counts == [1, 3, 4, 5]
    assert value(prometheus, "rljob_reward_score_accumulated", **labels) == 1.94, "the sum for the mean"


def test_number_of_series_of_components_is_limited():
    prometheus = PrometheusMetrics()
    for i in range(100):
        prometheus.record_scored("train", trajectory(a=valid(1.0, **{f"key{i}": 1.0})))
    components = {dict(labels)["component"] for name, labels in read(prometheus) if name == "rljob_reward_score_count"}
    assert len(components) == 33, "the score and 32 components"
    assert value(prometheus, "rljob_reward_score_count", reward="a", lane="train", component="score") == 100
    for step in range(10):
        means = {f"key{i}": 1.0 for i in range(100 * step, 100 * step + 100)}
        prometheus.log(step_record(step, components=means, grad_norm=0.5))
    gauges = [name for name, _ in read(prometheus) if name == "rljob_step_components"]
    assert len(gauges) == 256
    assert value(prometheus, "rljob_step_grad_norm") == 0.5


def test_steps_are_counted_by_staleness_and_role():
    prometheus = PrometheusMetrics()
    step = {"step_seconds": 10.0, "busy_shares": {"rollouts": 1.0, "trainer": 0.25}, "mismatch_kl": 0.004}
    first = step | {"staleness_histogram": {0: 100, 2: 20}, "num_skipped_updates": 1, "num_replaced_groups": 4}
    prometheus.log(step_record(1, **first))
    prometheus.log(step_record(2, **step, staleness_histogram={0: 30}))
    prometheus.log(evaluation_record(2, seconds=3.0))
    assert value(prometheus, "rljob_trained_tokens_total", staleness="0") == 130
    assert value(prometheus, "rljob_trained_tokens_total", staleness="2") == 20
    assert value(prometheus, "rljob_busy_seconds_total", role="trainer") == 5
    assert value(prometheus, "rljob_busy_seconds_total", role="rollouts") == 20
    assert value(prometheus, "rljob_skipped_updates_total") == 1
    assert value(prometheus, "rljob_replaced_groups_total") == 4
    assert value(prometheus, "rljob_step_mismatch_kl") == 0.004


async def test_driver_counts_samples_and_time_by_phase(make_harness):
    async with make_harness(schedule={"steps": 2}) as harness:
        await harness.run()
    text = harness.prometheus
    assert value(text, "rljob_samples_total", lane="train") == 2 * 4 * 4
    assert value(text, "rljob_samples_total", lane="eval") == 2 * 4
    labels = {"reward": "correct", "lane": "train", "outcome": "valid"}
    assert value(text, "rljob_reward_latency_seconds_count", **labels) == 2 * 4 * 4
    assert value(text, "rljob_reward_score_count", reward="correct", lane="train", component="exact") == 2 * 4 * 4
    assert value(text, "rljob_reward_invalid_total", reward="correct", lane="eval", reason="timeout") == 0, (
        "exported as 0 from the start, so that rate() works for the first event"
    )
    assert value(text, "rljob_reward_in_flight", reward="correct") == 0
    assert value(text, "rljob_reward_attempts_total", reward="correct", lane="train") == 2 * 4 * 4
    assert value(text, "rljob_step_reward_versions", reward="correct") == 1
    assert value(text, "rljob_reward_waiting", reward="correct") == 0
    assert value(text, "rljob_reward_waiting_oldest_seconds", reward="correct") == 0
    for name in ("hedges", "hedge_wins", "rescored"):
        assert value(text, f"rljob_reward_{name}_total", reward="correct") == 0, name
    for phase in ("generate", "update", "publish", "sync", "evaluate", "checkpoint"):
        assert value(text, "rljob_phase_seconds_total", phase=phase) > 0, phase


def test_conversations_are_counted_by_end_tool_cause_and_failure():
    prometheus = PrometheusMetrics()
    calls = [ToolCall("0", "add", {}, tool="calc"), ToolCall("1", "oops", None, error="unknown")]
    failure = EpisodeFailure("user", "spec.agent.user", "timeout", "took 9 s")
    talk = episode(messages=[{}], end=EpisodeEnd.FAILED, failure=failure, breaks=[ContextBreak("history")])
    talk.turns = [Turn("a", tool_calls=calls), Turn("b")]
    prometheus.record_scored("train", talk)
    prometheus.record_scored("train", trajectory(correct=valid(1.0)))
    found = {
        name: count
        for (name, _), count in read(prometheus).items()
        if name.startswith("rljob_agent") and name.endswith("_total") and count
    }
    assert found == {
        "rljob_agent_episodes_total": 1, "rljob_agent_turns_total": 2, "rljob_agent_tool_calls_total": 1,
        "rljob_agent_further_segments_total": 1, "rljob_agent_failures_total": 1,
    }  # fmt: skip
    assert value(prometheus, "rljob_agent_tool_calls_total", lane="train", tool="_none", outcome="error") == 1
    assert value(prometheus, "rljob_agent_tool_calls_total", lane="train", tool="calc", outcome="valid") == 1
    assert value(prometheus, "rljob_agent_failures_total", lane="train", service="user", reason="timeout") == 1


def test_calls_are_counted_by_service_and_outcome():
    prometheus = PrometheusMetrics()
    result = CallResult(id="e", valid=False, reason="timeout")
    prometheus.record_call("user", "eval", result, 9.0)
    labels = {"service": "user", "lane": "eval", "outcome": "timeout"}
    assert value(prometheus, "rljob_agent_call_seconds_count", **labels) == 1
    assert value(prometheus, "rljob_agent_call_seconds_sum", **labels) == 9.0


def test_gateway_exports_what_it_does_its_responses_and_its_overhead():
    metrics, now = PrometheusMetrics(), {"episodes": 3.0, "in_flight": 2.0, "oldest_seconds": 1.5}
    metrics.register_gateway(lambda: now)
    metrics.record_response("chat/completions", "policy", 410)
    metrics.record_overhead(0.002, 0.2)
    text = metrics.render().decode()
    assert "rljob_gateway_episodes 3.0" in text
    assert "rljob_gateway_in_flight 2.0" in text
    assert "rljob_gateway_oldest_seconds 1.5" in text
    assert 'rljob_gateway_responses_total{api="chat/completions",model="policy",status="410"} 1.0' in text
    assert 'rljob_gateway_overhead_seconds_bucket{le="0.003",part="to_engine"} 1.0' in text
    assert 'rljob_gateway_overhead_seconds_sum{part="to_client"} 0.2' in text


def test_reward_of_a_program_is_exported_as_one():
    metrics = PrometheusMetrics()
    metrics.record_scored("train", episode([1], [1], own_reward=0.5, info={"solved": True, "why": "text"}))
    failure = EpisodeFailure("runner", "spec.agent.runner", "timeout", "x")
    metrics.record_scored("train", episode([1], [1], own_reward=9.0, failure=failure))
    text = metrics.render().decode()
    assert 'rljob_reward_score_accumulated{component="score",lane="train",reward="runner"} 0.5' in text
    assert 'rljob_reward_score_accumulated{component="solved",lane="train",reward="runner"} 1.0' in text
    assert 'component="why"' not in text
