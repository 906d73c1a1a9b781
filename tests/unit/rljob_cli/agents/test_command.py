"""What `rljob test-agent` plays: the row, the objects, and what it prints besides the episode."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rljob_cli.agents import command
from rljob_cli.agents.command import describe_rest, is_invalid, place_row, read_row
from rljob_cli.check.jobfile import load
from rljob_cli.exits import EXIT_INTERRUPTED
from rljob_cli.main import app
from rljob_inputs.data.rows import read_rows
from tests.paths import EXAMPLES
from tests.support.records import result_row, sample_row

FEEDBACK = EXAMPLES / "feedback" / "rljob.yaml"


def rljob(*arguments):
    done = CliRunner().invoke(app, ["test-agent", *map(str, arguments)])
    return done.exit_code, done.output


def test_episodes_have_copies_of_one_row_and_the_sampling_of_training(tmp_path):
    job = load(FEEDBACK).job
    values = read_row(job, 2, {})
    placed = place_row(job, values, 3, tmp_path).spec
    sources = (placed.data.train.source, placed.data.eval.source)
    train, held_out = ([json.loads(line) for line in Path(source).read_text().splitlines()] for source in sources)
    assert (len(train), held_out) == (placed.trainer.num_ranks, [values] * 3)
    assert read_row(job, 2, {}) != read_row(job, 0, {})
    assert placed.evaluation.sampling == job.spec.rollout.sampling
    assert placed.evaluation.at_start


@pytest.mark.parametrize(("column", "expected"), [({}, "train.jsonl"), ({"data_source": "mine"}, "mine")])
def test_copies_of_a_row_have_the_data_source_of_training(tmp_path, column, expected):
    job = load(FEEDBACK).job
    placed = place_row(job, {**read_row(job, 0, {}), **column}, 1, tmp_path).spec.data
    assert (placed.train.data_source, placed.eval.data_source) == (expected, expected)


def test_row_of_an_environment_keeps_its_number_and_its_split(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        command, "read_env_row", lambda *given: asked.append(given[1:4]) or {"question": "a", "index": 4}
    )
    job = load(EXAMPLES / "environment" / "rows.yaml", ["spec.data.train.offset=3"]).job
    values = read_row(job, 1, {})
    assert asked == [(job.spec.data.train, "spec.data.train", 1)]
    placed = place_row(job, values, 1, tmp_path).spec.data
    for source in (placed.train, placed.eval):
        assert (source.split, source.offset, source.limit) == ("train", 0, None), (
            "the copies are all rows of their file"
        )
        assert [row.values for row in read_rows(source, source.source, split="test")][:1] == [values]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, asyncio.CancelledError])
def test_stop_while_the_environment_makes_the_row_is_no_crash(monkeypatch, stop):
    def read_row(*_):
        raise stop

    monkeypatch.setattr(command, "read_env_row", read_row)
    assert rljob(EXAMPLES / "environment" / "rows.yaml", "--completion", "4") == (EXIT_INTERRUPTED, "")


def test_row_beyond_the_limit_starts_no_environment():
    done = rljob(EXAMPLES / "environment" / "rows.yaml", "--row", 1000, "--completion", "3")
    assert done[0] == 2
    assert "spec.data.train.source: env://train: --row 1000: limit is 1000" in " ".join(done[1].split())


@pytest.mark.parametrize("agent", ["program", "environment"])
def test_program_that_fails_is_not_tried_again(tmp_path, agent):
    CliRunner().invoke(app, ["init", str(tmp_path / "mine"), "--agent", agent])
    job = load(tmp_path / "mine" / "rljob.yaml").job
    assert job.spec.agent.runner.retries > 0
    placed = place_row(job, read_row(job, 0, {}), 1, tmp_path).spec.agent
    assert (placed.runner.retries, placed.runner.replicas) == (0, 1)
    assert placed.runner.function == job.spec.agent.runner.function


def test_environment_without_a_runner_is_not_tried_again(tmp_path):
    agent = {"type": "environment", "environment": {"framework": "verifiers", "id": "gsm8k"}, "runner": None}
    job = load(FEEDBACK, [f"spec.agent={json.dumps(agent)}"]).job
    assert place_row(job, {}, 1, tmp_path).spec.agent.runner_settings.retries == 0


def row(num_turns, end, **fields):
    return sample_row(**{"turns": [{"text": "30"}] * num_turns, "end": end, "rewards": [result_row(1.0)]} | fields)


@pytest.mark.parametrize(
    ("found", "answers", "lines"),
    [
        (row(1, "user"), ["31"], []),
        (row(1, "user"), ["31", "32"], ["1 of 2 answers were not used: the episode had ended"]),
        (row(1, "max_turns"), ["30"], ["the policy would answer next, up to 3 times; add --completion"]),
        (row(3, "max_turns"), ["30", "30", "30"], []),
        (row(3, "max_turns"), [], []),
    ],
)
def test_answers_that_are_too_many_or_too_few_are_reported(found, answers, lines):
    assert describe_rest([found], load(FEEDBACK).job, answers) == lines


def test_episode_without_a_score_is_invalid():
    assert not is_invalid(row(1, "user"))
    assert is_invalid(row(1, "failed", failure="spec.agent.user: timeout: killed", rewards=[]))
    assert is_invalid(row(1, "user", rewards=[result_row()]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [EXAMPLES / "chat" / "rljob.yaml"],
            "spec.agent.type must be loop, program or environment; `rljob test-reward` scores single answers",
        ),
        (
            [FEEDBACK, "--completion", "1", "--episodes", "2"],
            "--episodes is for the base model; given answers are one episode",
        ),
        ([FEEDBACK, "--row", "1000", "--completion", "1"], "has fewer rows"),
    ],
)
def test_wrong_arguments_start_nothing(arguments, message):
    code, output = rljob(*arguments)
    assert code == 2
    assert message in output


def test_source_that_is_not_python_is_reported_before_anything_starts(tmp_path):
    job = tmp_path / "job" / "rljob.yaml"
    CliRunner().invoke(app, ["init", str(job.parent), "--agent", "loop"])
    (job.parent / "user.py").write_text("def respond(:\n")
    code, output = rljob(job, "--completion", "4")
    assert code == 2
    assert "spec.agent.user.function.file" in output
