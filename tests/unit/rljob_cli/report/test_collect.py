"""What a report reads from whole and from incomplete folders."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rljob_api.errors import UserError
from rljob_api.run.folder import TrajectoryFile
from rljob_api.run.metrics import Metrics
from rljob_cli.report.collect import add_agent, collect_run, plan_reading
from rljob_cli.report.page import render_page
from rljob_cli.report.sections import summarize_failures, summarize_rewards
from tests.paths import DATA
from tests.support.records import result_row, sample_row


@pytest.fixture
def run(tmp_path):
    """A real run of 8 steps and 3 evaluations in two sessions."""
    return shutil.copytree(DATA / "report", tmp_path / "letters")


def test_whole_folder_is_read(run):
    found = collect_run(run)
    assert (found.name, found.summary.phase, found.num_files, found.num_samples) == ("letters", "Succeeded", 11, 152)
    assert sum(map(len, found.samples)) == 152
    assert [rows[0].step for rows in found.samples] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8], "oldest first"
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
    assert (summary.phase, summary.steps, summary.total_steps) == ("Unfinished", 4, 8)
    assert summary.wall_seconds == pytest.approx(136.985)


def test_folder_from_a_cluster_has_metrics_and_trajectories_only(run):
    for name in ("job.yaml", "sessions.json", "summary.json"):
        (run / name).unlink()
    found = collect_run(run)
    assert (found.name, found.job, found.job_digest) == ("letters", None, "")
    assert (found.summary.wall_seconds, found.summary.sessions) == (None, [])
    assert found.summary.evaluations[-1].step == 8


def test_run_without_a_log_still_has_its_curves(run):
    shutil.rmtree(run / "trajectories")
    found = collect_run(run)
    assert (found.samples, found.num_samples) == ([], 0)
    assert (len(found.metrics.steps), len(found.metrics.evaluations)) == (8, 3)


def test_of_many_short_samples_a_part_is_read(run):
    for step in range(1, 5):
        path = run / f"trajectories/step-00000{step}.train.parquet"
        pq.write_table(pa.concat_tables([pq.read_table(path)] * 100), path, compression="zstd")
    found = collect_run(run, max_files=40)
    assert found.num_samples == 6_488
    assert 2_000 < sum(map(len, found.samples)) < 3_000


@pytest.mark.parametrize("size", [0, 2_000])
def test_a_damaged_file_of_the_log_hides_itself_alone(run, size):
    name = "step-000003.train.parquet"
    path = run / "trajectories" / name
    path.write_bytes(path.read_bytes()[:size])
    found = collect_run(run)
    assert (found.damaged, found.num_samples, found.num_files) == ([name], 136, 11)
    assert name in render_page(found, datetime(2026, 11, 22, tzinfo=UTC))


def test_a_part_of_the_log_can_stand_for_it(run):
    found = collect_run(run, max_files=3)
    assert (found.num_files, [len(rows) > 0 for rows in found.samples]) == (11, [True] * 3)


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match="not the folder of a run"):
        collect_run(tmp_path)


def sized(num_train, num_eval, size, num_rows=100):
    """Files with their bytes and rows."""
    lanes = (("train", num_train), ("eval", num_eval))
    paths = [TrajectoryFile(step, lane, Path(f"{step}.{lane}")) for lane, count in lanes for step in range(count)]
    return [(file, size, num_rows) for file in sorted(paths)]


def test_a_small_log_is_read_as_a_whole():
    found = plan_reading(sized(9, 3, 100), max_bytes=1200)
    assert [(file.step, file.lane) for file, _ in found] == [(file.step, file.lane) for file, *_ in sized(9, 3, 100)]
    assert {num_rows for _, num_rows in found} == {100}


def test_every_step_of_a_large_log_gives_some_rows():
    """Answers of 6,000 words made 4 MB a step, and the report showed the last step alone."""
    found = plan_reading(sized(20, 2, 4_400_000, 512), max_bytes=8 << 20)
    assert len(found) == 22
    assert {num_rows for _, num_rows in found} == {44}


def test_files_are_spread_over_the_run_where_not_all_fit():
    found = plan_reading(sized(9, 3, 100, 1), max_bytes=600)
    assert [(file.step, file.lane) for file, _ in found] == [
        (0, "eval"), (0, "train"), (1, "eval"), (2, "eval"), (4, "train"), (8, "train"),
    ]  # fmt: skip
    found = plan_reading(sized(5000, 0, 10, 10), max_files=5)
    assert [file.step for file, _ in found] == [0, 1250, 2500, 3750, 4999]


def test_last_file_of_each_lane_is_read_however_large():
    found = plan_reading(sized(9, 3, 100), max_bytes=1)
    assert [(file.step, file.lane) for file, _ in found] == [(2, "eval"), (8, "train")]
    assert {num_rows for _, num_rows in found} == {2}
    assert plan_reading([]) == []


def test_rewards_of_agents_and_failed_episodes_are_results_as_any_other():
    failure = "spec.agent.runner: exception: agent.py:12: KeyError: 'x'"
    info = json.dumps({"wrong": 2, "feedback": "too high"})
    found = (sample_row(own_reward=1.0, info=info), sample_row(own_reward=0.0), sample_row(failure=failure))
    rows = list(map(add_agent, found))
    first, failed = summarize_rewards(rows)
    assert (first.name, first.num_results, first.num_valid, first.mean_score) == ("runner", 2, 2, 0.5)
    assert (failed.name, failed.num_results, failed.num_valid) == ("spec.agent.runner", 1, 0)
    assert rows[0].rewards[0].components == {"wrong": 2}
    [found] = summarize_failures(Metrics(), rows)
    assert (found.reason, [message.text for message in found.messages]) == ("exception", ["agent.py:12: KeyError: 'x'"])


def test_sample_without_an_agent_is_unchanged():
    row = sample_row(rewards=[result_row(1.0)])
    assert add_agent(row) == row
