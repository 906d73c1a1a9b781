"""What `rljob test-reward` asks of a reward that sees groups, and what it makes of the answers."""

from __future__ import annotations

import json
import subprocess
import sys

from rljob_api.wire.protocol import ScoreResult
from rljob_cli.check.try_reward import build_groups, label_outcomes
from tests.paths import ROOT

ROWS = [
    {"completion": "a", "prompt": "1+1?", "answer": "2"},
    {"completion": "b", "prompt": "2+2?", "answer": "4"},
    {"completion": "c", "prompt": "1+1?", "answer": "2", "num_tokens": 7},
]
LENGTH = ROOT / "examples" / "length"


def test_rows_of_one_prompt_are_a_group_where_the_reward_sees_one():
    groups = build_groups(ROWS, "sums", in_groups=True)
    assert [[request.completion for request in group] for group in groups] == [["a", "c"], ["b"]]
    assert groups[0][1].extra_info["num_tokens"] == 7
    alone = build_groups(ROWS, "sums", in_groups=False)
    assert [[request.completion for request in group] for group in alone] == [["a"], ["b"], ["c"]]


def test_a_row_may_say_which_group_it_is_of():
    rows = [{**row, "group": number} for row, number in zip(ROWS, (1, 1, 2), strict=True)]
    groups = build_groups(rows, "", in_groups=True)
    assert [[request.completion for request in group] for group in groups] == [["a", "b"], ["c"]]
    assert "group" not in groups[0][0].extra_info
    assert build_groups(rows, "", in_groups=False)[0][0].extra_info["group"] == 1, (
        "elsewhere it is a column like others"
    )


def test_samples_are_numbered_within_their_groups():
    groups = build_groups(ROWS, "", in_groups=True)
    results = [[ScoreResult(id=request.id, valid=True, score=0.0) for request in group] for group in groups]
    assert [outcome.label for outcome in label_outcomes(groups, results, in_groups=True)] == ["1.1", "1.2", "2.1"]


def test_the_length_example_is_tried_as_its_readme_says():
    completions = (LENGTH / "completions.jsonl").read_text().splitlines()
    command = [sys.executable, "-m", "rljob_cli.main", "test-reward", str(LENGTH / "rljob.yaml")]
    command += ["--file", str(LENGTH / "completions.jsonl")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=None)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in run.stdout.splitlines() if "│" in line]
    scores = {row[0]: row[3] for row in rows if row[0]}
    assert len(scores) == len(completions)
    assert scores == {"1.1": "1", "1.2": "0.5", "1.3": "0", "2.1": "1", "2.2": "0"}
    assert all(json.loads(line)["completion"] for line in completions)
