"""The summary of a run says what happened, also after a stop or a resume."""

import pytest
from rich.console import Console

from rljob_cli.run.sessions import Session
from rljob_cli.run.summary import build_summary, print_summary, summary_lines


def step(number, **row):
    return {"type": "step", "step": number, "reward": 0.5, "num_samples": 8, "rewards": {"r": 0.5}, **row}


def evaluation(number, accuracy, **means):
    return {"type": "eval", "step": number, "accuracy": accuracy, "means": means, "num_samples": 4, "seconds": 2.0}


def session(seconds=1.0, **fields):
    return Session("2026-11-22T08:00:00+00:00", seconds=seconds, **fields)


def summarize(*rows, phase="Interrupted", driver=None, sessions=None, total_steps=4, checkpoint=None):
    return build_summary(
        name="j",
        phase=phase,
        total_steps=total_steps,
        driver=driver or {},
        rows=list(rows),
        sessions=[session()] if sessions is None else sessions,
        checkpoint=checkpoint,
    )


def lines(*rows, **options):
    return dict(summary_lines(summarize(*rows, **options)))


def test_restarts_of_sessions_and_driver_are_added():
    driver = {"step_rewards": [0.5], "restarts": {"trainer": 1}, "new": 7}
    sessions = [session(restarts={"trainer": 2, "head": 0}), session(restarts={"head": 1})]
    summary = summarize(step(1), driver=driver, sessions=sessions)
    assert summary["restarts"] == {"head": 1, "trainer": 3}
    assert summary["new"] == 7


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        ("Interrupted", "0.000 (step 0; interrupted before the last)"),
        ("Failed", "0.000 (step 0; failed before the last)"),
        ("Succeeded", "0.000 (step 0)"),
    ],
)
def test_one_evaluation_is_not_shown_as_a_change(phase, text):
    driver = {"step_rewards": [0.5], "accuracy_before": 0.0, "accuracy_after": 0.0, "eval_after": {"score": 0.0}}
    rows = [evaluation(0, 0.0, score=0.0), step(1)]
    assert lines(*rows, phase=phase, driver=driver)["held-out accuracy"] == text
    assert lines(*rows, phase=phase, driver=driver)["  score"] == "0.000 (step 0)"
    summary = summarize(*rows, phase=phase, driver=driver)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.0, None)
    assert (summary["metrics_before"], summary["metrics_after"]) == ({"score": 0.0}, {})


def test_evaluations_of_an_interrupted_run_have_their_steps():
    rows = [evaluation(0, 0.1), step(1), step(2), evaluation(2, 0.4), step(3)]
    assert lines(*rows)["held-out accuracy"] == "0.100 -> 0.400 (steps 0 and 2; interrupted before the last)"
    assert lines(*rows, total_steps=2)["held-out accuracy"] == "0.100 -> 0.400", "the last was reached"


def test_accuracy_is_unknown_when_all_samples_were_invalid():
    assert lines(evaluation(0, None), evaluation(4, 0.5), phase="Succeeded")["held-out accuracy"] == "- -> 0.500"
    assert "held-out accuracy" not in lines(evaluation(0, None))


def test_wall_time_counts_all_sessions():
    sessions = [session(20.0, phase="Interrupted"), session(30.5, after_step=2)]
    shown = lines(step(1, phase_seconds={"update": 40.0}), sessions=sessions)["wall time"]
    assert shown == "50.5 s in 2 sessions: update 40.0 s"
    assert summarize(step(1), sessions=sessions)["sessions"][1]["after_step"] == 2


def test_wall_time_without_sessions_is_unknown():
    assert summarize(step(1), sessions=[])["wall_seconds"] is None
    assert lines(step(1), sessions=[])["wall time"] == "not recorded"


def test_rows_decide_when_the_drivers_summary_is_older():
    rows = [evaluation(0, 0.0), step(1, phase_seconds={"update": 1.0}), step(2, reward=0.7, num_masked=3)]
    driver = {"step_rewards": [0.5], "samples_trained": 8, "rewards_served": 12, "phase_seconds": {"update": 1.0}}
    summary = summarize(*rows, driver=driver)
    assert summary["step_rewards"] == [0.5, 0.7]
    assert (summary["samples_trained"], summary["rewards_served"]) == (13, 20)
    assert summary["phase_seconds"] == {"update": 1.0, "evaluate": 2.0}
    same = summarize(*rows, driver=driver | {"step_rewards": [0.5, 0.7], "phase_seconds": {"starting": 9.0}})
    assert same["phase_seconds"] == {"starting": 9.0}, "the driver also counts what is in no row"
    assert same["samples_trained"] == 8


def test_results_of_all_rewards_are_counted_without_a_drivers_summary():
    two = {"rewards": {"a": 0.5, "b": None}}
    counted = [step(1, **two, num_masked=2, invalid_by_reason={"timeout": 3}), step(2, **two)]
    summary = summarize(evaluation(0, 0.0), *counted)
    assert (summary["rewards_served"], summary["samples_trained"]) == ((4 + 8 + 8) * 2, 14)
    assert summary["invalid_by_reason"] == {"timeout": 3}


def test_accuracy_after_is_of_the_last_evaluation():
    summary = summarize(evaluation(0, 0.1, a=1.0), evaluation(2, 0.2, a=2.0), evaluation(4, 0.3, a=3.0))
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.1, 0.3)
    assert (summary["metrics_before"], summary["metrics_after"]) == ({"a": 1.0}, {"a": 3.0})
    summary = summarize(evaluation(1, 0.2, a=2.0))
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (None, 0.2), "evaluation.atStart is off"


def test_lines_of_a_finished_run_are_complete():
    driver = {
        "step_rewards": [0.25, None, 0.5],
        "samples_trained": 22,
        "rewards_served": 24,
        "invalid_by_reason": {"timeout": 2, "exception": 0},
        "restarts": {"trainer": 1},
        "pause_seconds": 0.5,
        "transfer_seconds": None,
        "weight_digests": {"trainer": "a", "rollout": "a"},
    }
    found = lines(step(1), step(2), step(3), phase="Succeeded", driver=driver)
    assert found == {
        "reward": "0.250 -> 0.500 over 2 steps",
        "steps": "3",
        "wall time": "1.0 s",
        "samples trained": "22",
        "rewards served": "24, invalid: timeout 2",
        "restarts": "trainer 1",
        "weight updates": "0.500 s pause, 0.000 s transfer (mean)",
        "weight digests": "2 processes agree",
    }
    other = driver | {"weight_digests": {"trainer": "a", "rollout": "b", "other": "a"}, "step_rewards": [0.25] * 3}
    found = lines(step(1), step(2), step(3), phase="Succeeded", driver=other)
    assert found["weight digests"] == "3 processes DIFFER"
    assert lines(step(1))["reward"] == "0.500 (1 step)"
    assert lines(step(1))["restarts"] == "none"


def test_export_is_printed_in_one_line_with_the_command_that_serves_it():
    console, path = Console(width=40), "/runs/" + "long-name/" * 10 + "export"
    with console.capture() as drawn:
        print_summary(console, summarize(step(1)) | {"export": path})
    assert f"checkpoint: {path}\nserve it with: vllm serve {path}\n" in drawn.get()


def test_run_without_any_row_has_unknown_numbers():
    summary = summarize(phase="Failed")
    assert (summary["step_rewards"], summary["accuracy_before"], summary["samples_trained"]) == ([], None, None)
    assert lines(phase="Failed")["steps"] == "0 of 4; the same `rljob run` starts over, since there is no checkpoint"


def test_progress_reports_where_the_run_resumes():
    assert lines(step(3), checkpoint=2)["steps"] == "3 of 4; the same `rljob run` resumes after step 2"
    assert lines(step(4), phase="Succeeded")["steps"] == "4"


def test_long_names_are_folded_and_not_cut():
    name = "component_with_a_name_that_is_longer_than_the_terminal"
    console = Console(width=40)
    with console.capture() as drawn:
        print_summary(console, summarize(evaluation(0, 0.5, **{name: 1.0})))
    cells = [line.split("│")[1].strip() for line in drawn.get().splitlines() if line.startswith("│")]
    assert name in "".join(cells)
    assert "…" not in drawn.get()
