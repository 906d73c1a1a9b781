"""The lines of metrics.jsonl."""

import json
import math

from rljob_api.run.metrics import AgentNumbers, Metrics, StepRecord, ToolNumbers, append_records, read_metrics
from tests.paths import DATA
from tests.support.records import evaluation_record, step_record


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_records_are_the_same_after_a_round_trip(tmp_path):
    agent = AgentNumbers(turns_mean=2.5, tools={"calc": ToolNumbers(calls=2)}, failures={"user": 1})
    first = step_record(1, reward=0.5, components={"exact": 1.0}, staleness_histogram={0: 3, 2: 1}, agent=agent)
    second = evaluation_record(1, 0.25, means={"exact": 0.25}, seconds=2.0)
    for record in (first, second):
        append_records(tmp_path / "metrics.jsonl", [record])
    assert read_metrics(tmp_path / "metrics.jsonl") == Metrics((first,), (second,))


def test_incomplete_last_line_is_left_for_the_next_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_records(path, [step_record(1)])
    whole = path.read_text()
    for length in (1, 20, len(whole) // 2, len(whole) - 2):
        path.write_text(whole + whole[:length])
        assert read_metrics(path).last_step == 1
        assert len(read_metrics(path).steps) == 1
    assert read_metrics(tmp_path / "none") == Metrics()
    assert Metrics().last_step == 0


def test_unknown_keys_and_types_are_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"type": "step", "step": 3, "time": 1.0, "new": {"a": 1}, "agent": {"turns_mean": 2.0, "later": 1}}\n'
        '{"type": "other", "step": 3, "time": 1.0}\n'
    )
    [step] = read_metrics(path).steps
    assert (step.step, step.agent, step.reward) == (3, AgentNumbers(turns_mean=2.0), None)


def test_lines_are_strict_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    components = {"a": math.nan, "b": 0.5, "line\u2028separator": 1.0}
    append_records(path, [step_record(1, grad_norm=math.inf, reward=-math.inf, components=components)])
    record = json.loads(path.read_text(), parse_constant=refuse)
    assert (record["grad_norm"], record["reward"], record["components"]["a"]) == (None, None, None), "unknown is null"
    [step] = read_metrics(path).steps
    assert step.components == components | {"a": None}


def test_part_about_conversations_is_absent_without_one():
    assert "agent" not in json.loads(step_record(1).model_dump_json())


def test_line_begins_with_what_it_is_about():
    assert list(StepRecord.model_fields)[:3] == ["type", "step", "time"]


def test_run_of_an_older_version_is_readable():
    metrics = read_metrics(DATA / "report" / "metrics.jsonl")
    assert [step.step for step in metrics.steps] == list(range(1, 9))
    assert [found.step for found in metrics.evaluations] == [0, 4, 8]
