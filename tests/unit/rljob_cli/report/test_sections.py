"""Failures by reason."""

from rljob_api.run.metrics import Metrics
from rljob_cli.report.sections import summarize_failures
from tests.support.records import evaluation_record, metrics_of, result_row, sample_row, step_record


def sample(step, reward, reason, message):
    score = 1.0 if reason is None else None
    return sample_row(step=step, rewards=[result_row(score, reward, reason=reason, message=message)])


def test_counts_are_of_the_run_and_messages_of_the_samples():
    metrics = metrics_of(
        step_record(1, invalid_by_reason={"timeout": 3}),
        step_record(2, invalid_by_reason={"timeout": 1, "exception": 8}),
        evaluation_record(3, invalid_by_reason={"exception": 1}),
    )
    samples = [
        sample(1, "a", "timeout", "killed after 5 s"),
        sample(1, "a", None, ""),
        sample(2, "a", "exception", "KeyError: 'x'\n"),
        sample(2, "b", "exception", "KeyError: 'x'"),
        sample(2, "a", "exception", "KeyError: 'x'"),
    ]
    first, second = summarize_failures(metrics, samples)
    assert (first.reason, first.count, first.first_step) == ("exception", 9, 2)
    assert [(m.reward, m.step, m.text, m.count) for m in first.messages] == [
        ("a", 2, "KeyError: 'x'", 2),
        ("b", 2, "KeyError: 'x'", 1),
    ]
    assert (second.reason, second.count, second.first_step) == ("timeout", 4, 1)


def test_messages_that_differ_in_a_quoted_text_or_number_are_one_kind():
    texts = ["r.py:8: KeyError: 'x'", "r.py:8: KeyError: 'y'", 'r.py:9: KeyError: "z"', "r.py:9: ValueError"]
    [failure] = summarize_failures(Metrics(), [sample(1, "a", "exception", text) for text in texts])
    assert [(message.text, message.count) for message in failure.messages] == [
        ("r.py:8: KeyError: 'x'", 3),
        ("r.py:9: ValueError", 1),
    ]


def test_only_the_first_messages_are_kept():
    samples = [sample(3, "a", "exception", f"row {'x' * number}") for number in range(1, 101)]
    [failure] = summarize_failures(Metrics(), samples)
    assert [message.text for message in failure.messages] == [f"row {'x' * number}" for number in range(1, 6)]
    assert (failure.num_more, failure.count, failure.first_step) == (95, 100, 3)
