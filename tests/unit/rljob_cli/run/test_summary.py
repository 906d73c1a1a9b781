"""The summary of a run says what happened, also after a stop or a resume."""

import pytest
from rich.console import Console

from rljob_api.run.sessions import Session
from rljob_api.run.summaries import DriverSummary
from rljob_cli.run.summary import build_serve_command, build_summary, print_summary, summary_lines
from tests.support.records import evaluation_record, metrics_of, run_summary, step_record


def step(number, **fields):
    return step_record(number, **{"reward": 0.5, "num_samples": 8, "rewards": {"r": 0.5}} | fields)


def evaluation(number, accuracy, means=None, **fields):
    return evaluation_record(number, accuracy, means=means or {}, **{"num_samples": 4, "seconds": 2.0} | fields)


def session(seconds=1.0, **fields):
    return Session(started="2026-11-22T08:00:00+00:00", seconds=seconds, **fields)


def summarize(*records, phase="Interrupted", driver=None, sessions=None, total_steps=4, checkpoint=None):
    return build_summary(
        name="j",
        phase=phase,
        total_steps=total_steps,
        driver=None if driver is None else DriverSummary.model_validate(driver),
        metrics=metrics_of(*records),
        sessions=[session()] if sessions is None else sessions,
        checkpoint=checkpoint,
    )


def lines(*records, **options):
    return dict(summary_lines(summarize(*records, **options)))


def test_restarts_of_sessions_and_driver_are_added():
    driver = {"steps": 1, "restarts": {"trainer": 1}, "versions": {"torch": "7"}}
    sessions = [session(restarts={"trainer": 2, "head": 0}), session(restarts={"head": 1})]
    summary = summarize(step(1), driver=driver, sessions=sessions)
    assert summary.restarts == {"head": 1, "trainer": 3}
    assert summary.versions == {"torch": "7"}


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        ("Interrupted", "0.000 (step 0; interrupted before the last)"),
        ("Failed", "0.000 (step 0; failed before the last)"),
        ("Succeeded", "0.000 (step 0)"),
    ],
)
def test_one_evaluation_is_not_shown_as_a_change(phase, text):
    driver = {"steps": 1, "accuracy_before": 0.0, "accuracy_after": 0.0, "eval_after": {"score": 0.0}}
    records = [evaluation(0, 0.0, {"score": 0.0}), step(1)]
    assert lines(*records, phase=phase, driver=driver)["held-out accuracy"] == text
    assert lines(*records, phase=phase, driver=driver)["  score"] == "0.000 (step 0)"
    summary = summarize(*records, phase=phase, driver=driver)
    assert (summary.accuracy_before, summary.accuracy_after) == (0.0, None)
    assert (summary.metrics_before, summary.metrics_after) == ({"score": 0.0}, {})


def test_evaluations_of_an_interrupted_run_have_their_steps():
    records = [evaluation(0, 0.1), step(1), step(2), evaluation(2, 0.4), step(3)]
    assert lines(*records)["held-out accuracy"] == "0.100 -> 0.400 (steps 0 and 2; interrupted before the last)"
    assert lines(*records, total_steps=2)["held-out accuracy"] == "0.100 -> 0.400", "the last was reached"


def test_accuracy_is_unknown_when_all_samples_were_invalid():
    assert lines(evaluation(0, None), evaluation(4, 0.5), phase="Succeeded")["held-out accuracy"] == "- -> 0.500"
    assert "held-out accuracy" not in lines(evaluation(0, None))


def test_accuracy_has_the_numbers_of_failed_and_left_out_episodes():
    last = evaluation(4, 0.5, num_failed=3, num_left_out=2)
    shown = lines(evaluation(0, 0.25, num_failed=1), last, phase="Succeeded")["held-out accuracy"]
    assert shown == "0.250 -> 0.500; of the last 4: 3 failed, counted as 0, 2 without a score, left out"
    one = lines(evaluation(4, 0.5, num_left_out=2), phase="Succeeded")["held-out accuracy"]
    assert one == "0.500 (step 4); of the last 4: 2 without a score, left out"
    none = lines(evaluation(4, 0.5), phase="Succeeded")["held-out accuracy"]
    assert none == "0.500 (step 4)"
    [found] = summarize(last).evaluations
    assert (found.num_samples, found.num_failed, found.num_left_out) == (4, 3, 2)


def test_wall_time_counts_all_sessions():
    sessions = [session(20.0, phase="Interrupted"), session(30.5, after_step=2)]
    shown = lines(step(1, phase_seconds={"update": 40.0}), sessions=sessions)["wall time"]
    assert shown == "50.5 s in 2 sessions: update 40.0 s"
    assert summarize(step(1), sessions=sessions).sessions[1].after_step == 2


def test_wall_time_without_sessions_is_unknown():
    assert summarize(step(1), sessions=[]).wall_seconds is None
    assert lines(step(1), sessions=[])["wall time"] == "not recorded"


def test_the_share_that_trained_is_shown_with_what_took_the_rest():
    lost = {"start": 2.0, "restart": 30.0, "hung": 0.0}
    driver = {"steps": 1, "training_share": 0.75, "lost_seconds": lost}
    shown = lines(step(1), driver=driver)
    assert shown["training share"] == "75% of 128.0 s of the driver; lost: restart 30.0 s, start 2.0 s"
    newer = step(2, training_share=0.5, lost_seconds={"start": 2.0})
    assert lines(step(1), newer, driver=driver)["training share"] == "50% of 4.0 s of the driver; lost: start 2.0 s"
    assert "training share" not in lines(step(1))


def test_a_share_names_its_base():
    """69 % of the time trained, below a wall time of which it was 56 %."""
    summary = run_summary(wall_seconds=109.1, training_share=0.69, lost_seconds={"start": 27.156})
    assert dict(summary_lines(summary))["training share"].startswith(
        "69% of 87.6 s of the driver, 55% of the wall time; lost: start"
    )


def test_rows_decide_when_the_drivers_summary_is_older():
    records = [
        evaluation(0, 0.0, num_results=4),
        step(1, phase_seconds={"update": 1.0}),
        step(2, reward=0.7, num_masked=3),
    ]
    driver = {"steps": 1, "samples_trained": 8, "rewards_served": 12, "phase_seconds": {"update": 1.0}}
    summary = summarize(*records, driver=driver)
    assert summary.step_rewards == [0.5, 0.7]
    assert (summary.samples_trained, summary.rewards_served) == (13, 16 + 4)
    assert summary.phase_seconds == {"update": 1.0, "evaluate": 2.0}
    same = summarize(*records, driver=driver | {"steps": 2, "phase_seconds": {"starting": 9.0}})
    assert same.phase_seconds == {"starting": 9.0}, "the driver also counts what is in no row"
    assert same.samples_trained == 8


def test_results_of_all_rewards_are_counted_without_a_drivers_summary():
    two = {"rewards": {"a": 0.5, "b": None}}
    counted = [step(1, **two, num_masked=2, invalid_by_reason={"timeout": 3}), step(2, **two)]
    summary = summarize(evaluation(0, 0.0, num_results=8), *counted)
    assert (summary.rewards_served, summary.samples_trained) == ((4 + 8 + 8) * 2, 14)
    assert summary.invalid_by_reason == {"timeout": 3}


def test_accuracy_after_is_of_the_last_evaluation():
    summary = summarize(evaluation(0, 0.1, {"a": 1.0}), evaluation(2, 0.2, {"a": 2.0}), evaluation(4, 0.3, {"a": 3.0}))
    assert (summary.accuracy_before, summary.accuracy_after) == (0.1, 0.3)
    assert (summary.metrics_before, summary.metrics_after) == ({"a": 1.0}, {"a": 3.0})
    summary = summarize(evaluation(1, 0.2, {"a": 2.0}))
    assert (summary.accuracy_before, summary.accuracy_after) == (None, 0.2), "evaluation.atStart is off"


def test_lines_of_a_finished_run_are_complete():
    driver = {
        "steps": 3,
        "samples_trained": 22,
        "rewards_served": 24,
        "invalid_by_reason": {"timeout": 2, "exception": 0},
        "restarts": {"trainer": 1},
        "weight_digests": {"trainer": "a", "rollout": "a"},
    }
    steps = [step(1, reward=0.25, pause_seconds=0.25), step(2, reward=None), step(3, pause_seconds=0.75)]
    found = lines(*steps, phase="Succeeded", driver=driver)
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
    other = driver | {"weight_digests": {"trainer": "a", "rollout": "b", "other": "a"}}
    found = lines(step(1), step(2), step(3), phase="Succeeded", driver=other)
    assert found["weight digests"] == "3 processes DIFFER"
    assert lines(step(1))["reward"] == "0.500 (1 step)"
    assert lines(step(1))["restarts"] == "none"


def test_server_of_the_export_gets_the_variables_of_the_chat_template():
    assert build_serve_command("/runs/j/export", {"enable_thinking": False, "name": "it's"}) == (
        """vllm serve /runs/j/export --default-chat-template-kwargs '{"enable_thinking": false, "name": "it'"'"'s"}'"""
    )


def test_export_is_printed_in_one_line_with_the_command_that_serves_it():
    console, path = Console(width=40), "/runs/" + "long-name/" * 10 + "export"
    with console.capture() as drawn:
        print_summary(console, summarize(step(1)).model_copy(update={"export": path}))
    assert f"checkpoint: {path}\nserve it with: vllm serve {path}\n" in drawn.get()


def test_run_without_any_row_has_unknown_numbers():
    summary = summarize(phase="Failed")
    assert (summary.step_rewards, summary.accuracy_before, summary.samples_trained) == ([], None, None)
    assert lines(phase="Unfinished")["steps"].startswith("0 of 4; if it has stopped, the same `rljob run` starts over")
    assert lines(phase="Running")["steps"] == "0 of 4"
    assert lines(phase="Failed")["steps"] == "0 of 4; the same `rljob run` starts over, since there is no checkpoint"


def test_progress_reports_where_the_run_resumes():
    assert lines(step(3), checkpoint=2)["steps"] == "3 of 4; the same `rljob run` resumes after step 2"
    assert lines(step(4), phase="Succeeded")["steps"] == "4"


def test_long_names_are_folded_and_not_cut():
    name = "component_with_a_name_that_is_longer_than_the_terminal"
    console = Console(width=40)
    with console.capture() as drawn:
        print_summary(console, summarize(evaluation(0, 0.5, {name: 1.0})))
    cells = [line.split("│")[1].strip() for line in drawn.get().splitlines() if line.startswith("│")]
    assert name in "".join(cells)
    assert "…" not in drawn.get()


def test_steps_without_signal_are_in_the_summary_and_the_table():
    """A reward that is constant ended as Succeeded, with samples trained, and nothing else."""
    records = [
        step(1, zero_signal_share=1.0),
        step(2, zero_signal_share=0.5),
        step(3, num_samples=8, num_masked=8, zero_signal_share=1.0),
        step(4, num_samples=8, num_masked=8, zero_signal_share=None),
    ]
    assert summarize(*records).steps_without_signal == 3
    shown = lines(*records, phase="Succeeded")["steps without signal"]
    assert shown == "3 of 4: no sample had an advantage to learn from"
    assert "steps without signal" not in lines(step(1, zero_signal_share=0.0), phase="Succeeded")


def test_records_that_trackers_lost_are_in_the_table():
    driver = {
        "step_rewards": [0.5],
        "trackers": {"mlflow": {"sent": 3, "lost": 1, "waiting": 2}, "wandb": {}},
    }
    assert (
        lines(step(1), driver=driver)["records lost"] == "mlflow 3; `rljob report --send` sends them from metrics.jsonl"
    )


def test_most_memory_of_shared_devices_is_in_the_summary_and_the_table():
    records = [step(number, device_bytes={"rollouts_awake": number * 2**30}) for number in (2, 1)]
    assert summarize(*records).device_bytes == {"rollouts_awake": 2**31}
    assert lines(*records)["memory in turns"] == "rollouts awake 2.0 GiB"
    assert "memory in turns" not in lines(step(1))
