"""Failures by reason."""

from rljob_cli.report.failures import summarize_failures


def sample(step, reward, reason, message):
    return {"step": step, "rewards": [{"name": reward, "valid": reason is None, "reason": reason, "message": message}]}


def test_counts_are_of_the_run_and_messages_of_the_samples():
    metrics = [
        {"type": "step", "step": 1, "invalid_by_reason": {"timeout": 3}},
        {"type": "step", "step": 2, "invalid_by_reason": {"timeout": 1, "exception": 9}},
        {"type": "eval", "step": 2, "invalid_by_reason": {}},
    ]
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


def test_only_the_first_messages_are_kept():
    samples = [sample(3, "a", "exception", f"row {number}") for number in range(100)]
    [failure] = summarize_failures([], samples)
    assert [message.text for message in failure.messages] == [f"row {number}" for number in range(5)]
    assert (failure.num_more, failure.count, failure.first_step) == (95, 100, 3)
