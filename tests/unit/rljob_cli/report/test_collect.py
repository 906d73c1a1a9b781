"""What a report reads from whole and from incomplete folders."""

import json
import shutil

import pytest

from rljob_api.errors import UserError
from rljob_cli.report.collect import add_agent, choose_files, collect_run
from rljob_cli.report.failures import summarize_failures
from rljob_cli.report.rewards import summarize_rewards
from rljob_cli.trajectories.log import LogFile
from tests.paths import DATA


@pytest.fixture
def run(tmp_path):
    """A real run of 8 steps and 3 evaluations in two sessions."""
    return shutil.copytree(DATA / "report", tmp_path / "letters")


def test_whole_folder_is_read(run):
    found = collect_run(run)
    assert (found.name, found.summary["phase"], found.num_files, found.num_samples) == ("letters", "Succeeded", 11, 152)
    assert sum(map(len, found.samples)) == 152
    assert [rows[0]["step"] for rows in found.samples] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8], "oldest first"
    assert len(found.job_digest) == 16


def test_job_digest_changes_with_the_spec_only(run):
    before = collect_run(run).job_digest
    text = (run / "job.yaml").read_text()
    (run / "job.yaml").write_text("# a comment\n" + text)
    assert collect_run(run).job_digest == before
    (run / "job.yaml").write_text(text.replace("steps: 8", "steps: 9"))
    assert collect_run(run).job_digest != before


def test_run_in_progress_has_no_end(run):
    (run / "summary.json").unlink()
    sessions = json.loads((run / "sessions.json").read_text())
    sessions[-1] |= {"phase": "", "last_step": 5}
    (run / "sessions.json").write_text(json.dumps(sessions))
    rows = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(rows[:5]) + '\n{"type": "st')
    summary = collect_run(run).summary
    assert (summary["phase"], summary["steps"], summary["total_steps"]) == ("Unfinished", 4, 8)
    assert summary["wall_seconds"] == pytest.approx(136.985)


def test_folder_from_a_cluster_has_metrics_and_trajectories_only(run):
    for name in ("job.yaml", "sessions.json", "summary.json"):
        (run / name).unlink()
    found = collect_run(run)
    assert (found.name, found.job, found.job_digest) == ("letters", None, "")
    assert (found.summary["wall_seconds"], found.summary["sessions"]) == (None, [])
    assert found.summary["evaluations"][-1]["step"] == 8


def test_run_without_a_log_still_has_its_curves(run):
    shutil.rmtree(run / "trajectories")
    found = collect_run(run)
    assert (found.samples, found.num_samples) == ([], 0)
    assert len(found.metrics) == 11


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match="not the folder of a run"):
        collect_run(tmp_path)


def files(tmp_path, num_train, num_eval, size):
    found = []
    for lane, count in (("train", num_train), ("eval", num_eval)):
        for step in range(count):
            path = tmp_path / f"step-{step:06d}.{lane}.parquet"
            path.write_bytes(b"x" * size)
            found.append(LogFile(step, lane, path))
    return sorted(found)


def test_files_are_spread_over_the_run_within_the_limit(tmp_path):
    chosen = choose_files(files(tmp_path, 9, 3, 100), max_bytes=600)
    assert [(file.step, file.lane) for file in chosen] == [
        (0, "eval"), (0, "train"), (1, "eval"), (2, "eval"), (4, "train"), (8, "train"),
    ]  # fmt: skip


def test_last_file_of_each_lane_is_read_however_large(tmp_path):
    chosen = choose_files(files(tmp_path, 9, 3, 100), max_bytes=1)
    assert [(file.step, file.lane) for file in chosen] == [(2, "eval"), (8, "train")]
    assert choose_files([]) == []


def row(**fields):
    return {"step": 1, "rewards": [], "failure": None, "own_reward": None, "info": None} | fields


def test_rewards_of_agents_and_failed_episodes_are_results_as_any_other():
    failure = "spec.agent.runner: exception: agent.py:12: KeyError: 'x'"
    info = json.dumps({"wrong": 2, "feedback": "too high"})
    rows = [add_agent(row(own_reward=1.0, info=info)), add_agent(row(own_reward=0.0)), add_agent(row(failure=failure))]
    first, failed = summarize_rewards(rows)
    assert (first.name, first.num_results, first.num_valid, first.mean_score) == ("runner", 2, 2, 0.5)
    assert (failed.name, failed.num_results, failed.num_valid) == ("spec.agent.runner", 1, 0)
    assert rows[0]["rewards"][0]["components"] == {"wrong": 2}
    [found] = summarize_failures([], rows)
    assert (found.reason, [message.text for message in found.messages]) == ("exception", ["agent.py:12: KeyError: 'x'"])


def test_sample_without_an_agent_is_unchanged():
    assert add_agent(row(rewards=[{"name": "r"}])) == row(rewards=[{"name": "r"}])
