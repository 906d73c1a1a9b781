"""Names of gauges: data are labels."""

import pytest

from rljob_api.run.gauges import flatten, list_numbers, name_gauge
from rljob_api.run.metrics import AgentNumbers, EvaluationRecord, StepRecord, ToolNumbers
from tests.support.records import evaluation_record


@pytest.mark.parametrize(
    ("name", "gauge"),
    [
        ("grad_norm", ("rljob_step_grad_norm", "", "")),
        ("agent/turns_mean", ("rljob_step_agent_turns_mean", "", "")),
        ("components/acc@1 (%)", ("rljob_step_components", "component", "acc@1 (%)")),
        ("components/judge/polite", ("rljob_step_components", "component", "judge/polite")),
        ("rewards/a-b", ("rljob_step_rewards", "reward", "a-b")),
        ("phase_seconds/update", ("rljob_step_phase_seconds", "phase", "update")),
        ("staleness_histogram/2", ("rljob_step_staleness_tokens", "staleness", "2")),
        ("agent/tools/add/errors", ("rljob_step_agent_tools_errors", "tool", "add")),
        ("agent/episodes_by_end/max_turns", ("rljob_step_agent_episodes", "end", "max_turns")),
    ],
)
def test_data_are_labels(name, gauge):
    assert name_gauge("step", name) == gauge


def test_numbers_have_paths_without_the_step_and_the_time():
    agent = AgentNumbers(turns_mean=2.0, tools={"add": ToolNumbers(calls=3)})
    record = evaluation_record(4, None, means={"exact": 0.5, "odd": None}, seconds=2.0, agent=agent)
    numbers = flatten(record)
    assert numbers["means/exact"] == 0.5
    assert (numbers["agent/turns_mean"], numbers["agent/tools/add/calls"], numbers["seconds"]) == (2.0, 3.0, 2.0)
    assert not numbers.keys() & {"type", "step", "time", "accuracy", "means/odd"}


def test_each_number_of_a_record_has_a_separate_gauge():
    for kind in (StepRecord, EvaluationRecord):
        metrics = [number.metric for number in list_numbers(kind)]
        assert len(set(metrics)) == len(metrics)
