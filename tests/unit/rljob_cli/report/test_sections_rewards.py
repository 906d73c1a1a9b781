"""Each reward's results and times."""

from rljob_cli.report.sections import summarize_rewards
from tests.support.records import result_row, sample_row


def result(name, score, latency, **fields):
    times = {"latency_seconds": latency, "queue_seconds": 0.1, "execute_seconds": 0.2}
    return result_row(score, name, **times | fields)


def test_rewards_are_summarized_one_by_one():
    samples = [
        sample_row(rewards=[result("a", 1.0, 1.0), result("b", 0.5, 0.3)]),
        sample_row(rewards=[result("a", None, 3.0), result("b", 1.5, 0.3, execute_seconds=0.4)]),
        sample_row(rewards=[result("a", 0.0, 2.0)]),
    ]
    first, second = summarize_rewards(samples)
    assert (first.name, first.num_results, first.num_valid, first.mean_score) == ("a", 3, 2, 0.5)
    assert (first.latency_p50_seconds, first.latency_p95_seconds) == (2.0, 3.0)
    assert (second.name, second.mean_score, second.queue_p95_seconds) == ("b", 1.0, 0.1)
    assert abs(second.execute_mean_seconds - 0.3) < 1e-9


def test_unknown_times_are_not_zero():
    unknown = result("a", None, None, queue_seconds=None, execute_seconds=None)
    [reward] = summarize_rewards([sample_row(rewards=[unknown])])
    assert (reward.mean_score, reward.latency_p95_seconds, reward.execute_mean_seconds) == (None, None, None)
    assert summarize_rewards([]) == []
