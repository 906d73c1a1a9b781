"""The index of a trajectory log: filters and order without the texts, and the texts of one page."""

import os
from pathlib import Path

import pytest

from rljob_api.errors import UserError
from rljob_api.run.folder import list_trajectory_files, trajectory_file
from rljob_cli.trajectories import index as index_module
from rljob_cli.trajectories.index import ALL, LogIndex, Query, read_rows
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import EpisodeFailure, Group, ScoredResult
from rljob_trainer.history.trajectory_log import write_file
from tests.support.episodes import episode


def valid(score, seconds):
    return ScoredResult(id="x", valid=True, score=score, latency_seconds=seconds)


def invalid(reason, seconds):
    return ScoredResult(id="x", valid=False, reason=reason, message="m", latency_seconds=seconds)


def write(run, step, *samples, lane="train"):
    """Each sample: its score, results, and the text of its answer."""
    episodes = [
        episode(text=text, index=(0, 0, i), results=results, score=score, truncated=text.endswith("cut"))
        for i, (score, results, text) in enumerate(samples)
    ]
    write_file(trajectory_file(run, step, lane), lane, step, [Group(0, Prompt(0, "Prompt", [1]), episodes)])


@pytest.fixture
def run(tmp_path):
    write(tmp_path, 0, (0.9, {"fast": valid(0.9, 0.1)}, "held out"), lane="eval")
    write(
        tmp_path,
        1,
        (0.5, {"fast": valid(0.5, 0.1), "judge": valid(0.5, 4.0)}, "Alpha cut"),
        (None, {"fast": valid(0.7, 9.0), "judge": invalid("timeout", 2.0)}, "beta"),
        (0.2, {"fast": valid(0.2, 0.3), "judge": valid(0.1, 1.0)}, "gamma"),
    )
    write(tmp_path, 2, (0.4, {"fast": valid(0.4, 0.2), "judge": valid(0.4, 8.0)}, "delta"))
    return tmp_path


def index_of(run):
    index = LogIndex(run / "trajectories")
    index.read()
    return index


def places(index, query=ALL, **options):
    return describe(index.select(query, **options))


def describe(places):
    """Steps and rows. The lane follows from the step in these logs."""
    return [(place >> 33, place & 0xFFFFFFFF) for place in places.tolist()]


def found(run, **fields):
    return places(index_of(run), Query(**fields))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]),
        ({"step": 1, "lane": "train"}, [(1, 0), (1, 1), (1, 2)]),
        ({"step": 1, "lane": "eval"}, []),
        ({"order": "slow"}, [(1, 1), (2, 0), (1, 0), (1, 2), (0, 0)]),
        ({"order": "slow", "reward": "judge"}, [(2, 0), (1, 0), (1, 1), (1, 2)]),
        ({"order": "new"}, [(2, 0), (1, 0), (1, 1), (1, 2), (0, 0)]),
        ({"order": "high"}, [(0, 0), (1, 0), (2, 0), (1, 2), (1, 1)]),
        ({"order": "low"}, [(1, 2), (2, 0), (1, 0), (0, 0), (1, 1)]),
        ({"reason": "timeout"}, [(1, 1)]),
        ({"reason": "timeout", "reward": "fast"}, []),
        ({"reason": "exception"}, []),
        ({"shown": "invalid"}, [(1, 1)]),
        ({"shown": "truncated"}, [(1, 0)]),
        ({"shown": "best"}, [(0, 0), (1, 0), (2, 0)]),
        ({"shown": "worst"}, [(0, 0), (1, 2), (2, 0)]),
        ({"shown": "best", "reward": "fast"}, [(0, 0), (1, 1), (2, 0)]),
        ({"low": 0.4, "high": 0.5}, [(1, 0), (2, 0)]),
        ({"low": 0.0, "high": 0.3}, [(1, 2)]),
    ],
)
def test_samples_are_filtered_and_sorted(run, query, expected):
    assert found(run, **query) == expected


def test_texts_are_read_in_the_order_of_the_page(run):
    index = index_of(run)
    rows = index.read_samples(index.select(Query(order="slow"))[:3])
    assert [row.completion for row in rows] == ["beta", "delta", "Alpha cut"]
    assert rows[0].rewards[1].reason == "timeout"


def test_text_is_found_whatever_its_case(run):
    index = index_of(run)
    every = index.select(ALL)
    assert describe(index.find_text(every, "ALPHA")) == [(1, 0)]
    assert describe(index.find_text(every[::-1], "prompt")) == places(index)[::-1]


def test_only_files_that_changed_are_read_again(run, monkeypatch):
    index, read = LogIndex(run / "trajectories"), []
    original = index_module._read_table
    steps = {file.path: file.step for file in list_trajectory_files(run / "trajectories")}
    monkeypatch.setattr(
        index_module, "_read_table", lambda path, names: read.append(steps[path]) or original(path, names)
    )
    index.read()
    index.read()
    assert read == [0, 1, 2]
    write(run, 2, (0.1, {"fast": valid(0.1, 0.1)}, "again"), (0.2, {}, "more"))
    path = trajectory_file(run, 2, "train")
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))
    trajectory_file(run, 0, "eval").unlink()
    index.read()
    assert places(index) == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert read == [0, 1, 2, 2]


def test_a_long_log_is_read_in_parts_and_each_file_is_asked_for_once(tmp_path, monkeypatch):
    """One set was built anew for each file: 10,000 files took 10 s of CPU at each read."""
    for step in range(1, 31):
        write(tmp_path, step, (step / 100, {}, "a"))
    hashed, index = [], LogIndex(tmp_path / "trajectories")
    index.read(max_new=12)
    assert (len(places(index)), index.num_unread) == (12, 18)
    index.read(Query(step=30), max_new=1)
    assert places(index, Query(step=30)) == [(30, 0)], "a step does not wait for those before it"
    index.read(max_new=12)
    assert (len(places(index)), index.num_unread) == (25, 5)
    index.read()
    assert (len(places(index)), index.num_unread) == (30, 0)
    assert places(index) == [(step, 0) for step in range(1, 31)], "in the order of the run"
    original = Path.__hash__
    monkeypatch.setattr(Path, "__hash__", lambda path: hashed.append(path) or original(path))
    index.read()
    assert len(hashed) <= 3 * 30, "operations grow with the number of files, not with its square"


def test_a_request_reads_fewer_of_large_files(tmp_path, monkeypatch):
    """400 files of 1,000 samples took 39 s, until the first samples were shown."""
    monkeypatch.setattr(index_module, "_SAMPLES_AS_A_FILE", 2)
    for step in range(1, 9):
        write(tmp_path, step, *[(0.5, {}, "a")] * 4)
    index = LogIndex(tmp_path / "trajectories")
    index.read(max_new=6)
    assert (len(places(index)), index.num_unread) == (8, 6), "four samples count as two further files"


@pytest.mark.parametrize("content", [b"", b"PAR1 and no end"])
def test_a_damaged_file_hides_its_own_samples_alone(run, content, capsys):
    trajectory_file(run, 1, "train").write_bytes(content)
    index = index_of(run)
    assert places(index) == [(0, 0), (2, 0)]
    assert index.damaged == {"step-000001.train.parquet"}
    assert [row.step for row in read_rows(run / "trajectories", Query())] == [2, 0]
    assert "step-000001.train.parquet: cannot be read" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be read"):
        list(read_rows(run / "trajectories", Query(step=1)))


def test_samples_of_files_that_are_gone_or_shorter_are_left_out(run):
    index = index_of(run)
    every = index.select(ALL)
    trajectory_file(run, 0, "eval").unlink()
    write(run, 1, (0.1, {}, "short"))
    assert [row.completion for row in index.read_samples(every)] == ["delta"], "a repeated step has other samples"
    assert describe(index.find_text(every[:1], "held")) == []


def test_failed_episode_has_the_reason_of_its_failure(tmp_path):
    failure = EpisodeFailure("user", "spec.agent.user", "unreachable", "away: for good")
    failed = episode(index=(0, 0, 0), failure=failure)
    write_file(trajectory_file(tmp_path, 1, "train"), "train", 1, [Group(0, Prompt(0, "p", [1]), [failed])])
    index = index_of(tmp_path)
    assert places(index, Query(reward="spec.agent.user", reason="unreachable", shown="invalid")) == [(1, 0)]
    assert places(index, Query(reason="away")) == []
