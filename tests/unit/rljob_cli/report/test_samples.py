"""Which samples a report shows."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.run.trajectories import TurnRow
from rljob_cli.report.samples import choose_samples, describe_sample, format_answers, rank_samples, spread
from tests.support.records import result_row, sample_row

TURN = {"text": "2"}


def sample(score, **fields):
    reason = None if score is not None else "timeout"
    result = result_row(score, reason=reason, attempts=1, latency_seconds=0.1)
    return sample_row(**{"score": score, "num_sampled_tokens": 4, "rewards": [result]} | fields)


@given(st.integers(0, 300))
def test_spread_has_each_index_once_and_starts_at_both_ends(count):
    order = spread(count)
    assert sorted(order) == list(range(count))
    assert order[:2] == [*dict.fromkeys([count - 1, 0])][: count and 2]


def test_spread_reaches_the_middle_early():
    assert set(spread(9)[:3]) == {8, 0, 4}


def test_best_worst_and_first_failures_come_first():
    failed = sample(None, rewards=[result_row(reason="exception")])
    rows = [sample(0.5), sample(0.1), sample(None), sample(0.9), failed, sample(0.4)]
    assert rank_samples(rows)[:4] == [3, 1, 2, 4]
    assert sorted(rank_samples(rows)) == list(range(6))


def test_next_best_and_next_worst_follow_the_failures():
    rows = [sample(score / 10) for score in range(10)]
    assert rank_samples(rows)[:6] == [9, 0, 7, 8, 1, 2]


def test_small_run_is_shown_whole_and_in_order():
    steps = [[sample(0.1, step=1), sample(0.2, step=1)], [sample(0.3, step=2)]]
    assert choose_samples(steps) == [*steps[0], *steps[1]]


def test_limit_is_shared_by_all_steps():
    steps = [[sample(i / 10, step=number, sample=i) for i in range(10)] for number in range(5)]
    chosen = choose_samples(steps, max_samples=10)
    assert [(row.step, row.sample) for row in chosen] == [(n, i) for n in range(5) for i in (0, 9)]


def test_long_texts_are_bounded():
    steps = [[sample(0.5, completion="x" * 10_000), sample(0.6, completion="y" * 10_000)]]
    assert len(choose_samples(steps, max_characters=7_000)) == 1, "one is shown, however long"
    shown = describe_sample(sample(0.5, completion="begin" + "x" * 10_000 + "answer 42"))
    assert len(shown["completion"]) < 6_100
    assert shown["completion"].startswith("begin")
    assert shown["completion"].endswith("answer 42")
    assert "characters ..." in shown["completion"]


def test_conversation_is_shown_as_text():
    prompt = '[{"role": "user", "content": "2+2?"}]'
    assert describe_sample(sample(1.0, prompt=prompt))["prompt"] == "user: 2+2?"


def test_conversation_is_shown_from_its_first_answer():
    prompt = [{"role": "user", "content": "1 + 1?"}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    answers = [
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": [{"type": "text", "text": "Too high."}]},
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "assistant", "content": "2"},
    ]
    row = sample(1.0, prompt=json.dumps(prompt), messages=json.dumps(prompt + answers), turns=[TURN] * 3)
    text = 'assistant: 3\nuser: Too high.\nassistant: I add.\nadd({"a": 1})\nassistant: 2'
    assert format_answers(row) == text
    assert describe_sample(row)["completion"] == text
    assert format_answers(row.model_copy(update={"turns": [TurnRow(text="2")]})) == "c"


def test_conversation_that_replaced_its_prompt_is_shown_as_a_whole():
    messages = [{"role": "user", "content": "other"}, {"role": "assistant", "content": "2"}]
    row = sample(1.0, prompt='[{"role": "user", "content": "1 + 1?"}]', messages=json.dumps(messages), turns=[TURN] * 2)
    assert format_answers(row) == "user: other\nassistant: 2"
