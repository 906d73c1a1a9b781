"""`rljob trajectories` over logs as the trainer writes them."""

import json
import re
import sys
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rljob_api.run.folder import trajectory_file
from rljob_api.wire.base import InvalidReason
from rljob_cli.main import app
from rljob_cli.tables import CleanConsole
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Group, ScoredResult
from rljob_trainer.history.trajectory_log import write_file
from tests.support.episodes import episode

LONG = "begin " + "x" * 1000 + " the answer is 42"


def result(score, **fields):
    components = fields.pop("components", {})
    return ScoredResult(id="x", valid=True, score=score, components=components, latency_seconds=0.02, **fields)


def failed(reason=InvalidReason.TIMEOUT, attempts=3):
    return ScoredResult(id="x", valid=False, reason=reason, message="killed", attempts=attempts, latency_seconds=90.0)


def group(index, prompt, *samples):
    """A group; each sample is {reward: result}, and its score their sum."""
    episodes = [
        episode(
            text=LONG,
            version=1,
            index=(index, index, i),
            results=results,
            score=sum(r.score for r in results.values()) if all(r.valid for r in results.values()) else None,
            advantage=0.25,
        )
        for i, results in enumerate(samples)
    ]
    return Group(index, Prompt(index, prompt, [1], ground_truth="42"), episodes)


def write(run_dir, step, *groups, lane="train"):
    write_file(trajectory_file(run_dir, step, lane), lane, step, groups)


def rljob(*arguments):
    done = CliRunner().invoke(app, ["trajectories", *map(str, arguments)], env={"COLUMNS": "160"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done


def rows(*arguments):
    done = rljob(*arguments, "-o", "json")
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.output.splitlines()]


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "runs" / "sums"
    write(folder, 1, group(0, "1+1?", {"correct": result(0.0)}, {"correct": result(1.0)}))
    write(
        folder, 2,
        group(0, "2+2?", {"correct": result(1.0, components={"exact": 1.0})}, {"correct": failed()}),
        group(1, "3+3?", {"correct": result(0.5), "style": result(0.25)}),
    )  # fmt: skip
    write(folder, 2, group(0, "held out?", {"correct": result(1.0)}), lane="eval")
    return folder


def where(found):
    return [(row["step"], row["lane"], row["group"], row["sample"]) for row in found]


def test_newest_step_comes_first_and_rows_keep_the_order_of_the_data(run_dir):
    assert where(rows(run_dir)) == [
        (2, "train", 0, 0),
        (2, "train", 0, 1),
        (2, "train", 1, 0),
        (2, "eval", 0, 0),
        (1, "train", 0, 0),
        (1, "train", 0, 1),
    ]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--step", 1], [(1, "train", 0, 0), (1, "train", 0, 1)]),
        (["--lane", "eval"], [(2, "eval", 0, 0)]),
        (["--invalid"], [(2, "train", 0, 1)]),
        (["--reward", "style"], [(2, "train", 1, 0)]),
        (["--reward", "style", "--invalid"], []),
        (["--group", 1], [(2, "train", 1, 0)]),
        (["--max-score", 0.5], [(1, "train", 0, 0)]),
        (["--reward", "correct", "--max-score", 0.5], [(2, "train", 1, 0), (1, "train", 0, 0)]),
        (["--min-score", 0.6, "--max-score", 0.8], [(2, "train", 1, 0)]),
        (["--limit", 2], [(2, "train", 0, 0), (2, "train", 0, 1)]),
    ],
)
def test_filters_select_rows(run_dir, options, found):
    assert where(rows(run_dir, *options)) == found


def test_evaluation_set_selects_its_samples(run_dir):
    sets = [replace(group(number, "held out?", {"correct": result(1.0)}), held_out=f"set{number}") for number in (0, 1)]
    write(run_dir, 3, *sets, lane="eval")
    assert where(rows(run_dir, "--eval-set", "set1")) == [(3, "eval", 1, 0)]
    assert where(rows(run_dir, "--eval-set", "set1", "--step", 2)) == []
    done = rljob(run_dir, "--eval-set", "math")
    assert "--eval-set must be an evaluation set of the run: set0, set1; got math" in done.stderr
    assert "--eval-set is for the lane eval" in rljob(run_dir, "--eval-set", "set1", "--lane", "train").stderr


def test_invalid_sample_is_outside_any_score_bounds(run_dir):
    assert (2, "train", 0, 1) not in where(rows(run_dir, "--max-score", 0))


def test_json_has_the_complete_sample(run_dir):
    row = rows(run_dir, "--step", 2, "--lane", "train")[0]
    assert row["prompt"] == "2+2?"
    assert row["completion"] == LONG
    assert row["rewards"][0]["components"] == {"exact": 1.0}


def test_sample_has_its_results_and_both_ends_of_a_long_text(run_dir):
    shown = rljob(run_dir, "--step", 2, "--lane", "train").output
    first, second, _, _ = shown.split("\n\n")
    for text in ("begin", "42", "[... 623", "correct: 1, exact 1, 20 ms", "advantage 0.25", ">> completion"):
        assert text in first, shown
    assert "correct: invalid: timeout, killed, 90.0 s, 3 attempts" in second
    assert LONG not in shown.replace("\n", "")


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_narrow_terminal_cuts_no_number_and_no_message(run_dir, columns, monkeypatch):
    def make_console():
        return CleanConsole(sys.stdout, width=columns, force_terminal=True)

    monkeypatch.setattr("rljob_cli.tables.make_console", make_console)
    scores = {
        name: result(0.123456789) for name in ("exact", "style", "a_reward_with_a_name_of_fifty_characters_or_a_few")
    }
    message = " ".join(f"word{number}" for number in range(30))
    write(run_dir, 3, group(0, "1+1?", scores, {"exact": failed().model_copy(update={"message": message})}))
    shown = rljob("sums", "--dir", run_dir.parent, "--step", 3, "--lane", "train").output
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in shown.splitlines()]
    assert max(map(len, lines)) <= columns, shown
    assert sum(line.count("0.1235") for line in lines) >= 3, shown
    assert message in " ".join(" ".join(lines).split()), shown


def test_command_reports_that_samples_are_left_out(run_dir):
    assert "the first 2; more with --limit" in rljob(run_dir, "--limit", 2).output
    assert "more with --limit" not in rljob(run_dir).output


def test_run_is_found_by_folder_job_file_or_name(run_dir, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("kind: RewardModel\n---\nkind: RLJob\nmetadata: {name: sums}\n")
    directory = tmp_path / "runs"
    expected = where(rows(run_dir))
    assert where(rows(run_dir / "trajectories")) == expected
    assert where(rows(job, "--dir", directory)) == expected
    assert where(rows("sums", "--dir", directory)) == expected


@pytest.mark.parametrize("name", ["sums", "sums/"])
def test_name_of_a_run_means_the_run_and_not_the_folder_of_its_job(run_dir, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "rljob.yaml").touch()
    assert where(rows(name)) == where(rows(run_dir))
    monkeypatch.chdir(tmp_path / "runs")
    assert where(rows(name)) == where(rows(run_dir)), "in the parent of the runs the folder is the run"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "run not found"),
        (["sums", "--lane", "test"], "--lane must be train or eval, got test"),
    ],
)
def test_invalid_arguments_are_reported_with_a_remedy(run_dir, arguments, message):
    done = rljob(*arguments, "--dir", run_dir.parent)
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize("output", ["text", "json"])
def test_unknown_reward_is_an_error_with_the_names(run_dir, output):
    done = rljob("sums", "--dir", run_dir.parent, "--reward", "corect", "-o", output)
    assert done.exit_code == 2
    assert "--reward must be a reward of the run: correct, style; got corect" in done.output


def test_known_reward_without_a_matching_sample_succeeds(run_dir):
    done = rljob(run_dir, "--reward", "style", "--invalid")
    assert (done.exit_code, done.output) == (0, "no sample matches\n")


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "1+1?"}]},
    {"role": "tool", "content": {"result": 2}},
]


def test_conversation_is_shown_as_text(tmp_path):
    write(tmp_path / "chat", 1, group(0, CHAT, {"correct": result(1.0)}))
    shown = rljob("chat", "--dir", tmp_path).output
    for text in ("system: Be brief.", "user: What is 1+1?", 'tool: {"result": 2}'):
        assert text in shown, shown
    assert "role" not in shown


@pytest.mark.parametrize("prompt", ["[{1, 2}] is a set", '[{"a": 1}]'])
def test_prompt_that_only_looks_like_a_conversation_is_unchanged(tmp_path, prompt):
    write(tmp_path / "sums", 1, group(0, prompt, {"correct": result(1.0)}))
    assert prompt in rljob("sums", "--dir", tmp_path).output


def test_pipe_gets_whole_lines(run_dir, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = CliRunner().invoke(app, ["trajectories", str(run_dir), "--full"]).output
    assert LONG in shown


def test_run_without_a_log_is_explained(tmp_path):
    assert "trajectoriesSize" in rljob(tmp_path).output


def test_unreadable_file_or_other_version_is_named(run_dir):
    path = trajectory_file(run_dir, 3, "train")
    path.write_text("torn")
    done = rljob(run_dir)
    assert (done.exit_code, str(path) in done.output) == (0, True), "it hides its own samples alone"
    done = rljob(run_dir, "--step", "3")
    assert (done.exit_code, str(path) in done.output) == (2, True)
    pq.write_table(pa.table({"step": [3]}), path)
    assert "another version of rljob" in rljob(run_dir).output
