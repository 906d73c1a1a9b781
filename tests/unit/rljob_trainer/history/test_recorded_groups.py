"""What the trajectory log records is read back as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_api.errors import UserError
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreResult
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import (
    NOT_SAMPLED,
    Completion,
    ContextBreak,
    Episode,
    EpisodeEnd,
    EpisodeFailure,
    Group,
    ScoredResult,
    ToolCall,
    TrainedAs,
    Turn,
    empty_segment,
    prompt_segment,
    single_turn,
)
from rljob_trainer.history.recorded_groups import find_unscored, read_groups
from rljob_trainer.history.trajectory_log import write_file

tokens = st.lists(st.integers(0, 200_000), min_size=1, max_size=5)
numbers = st.floats(-10, 10, width=32)
rewards = st.one_of(st.none(), st.floats(-2, 2))


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    ids = draw(tokens)
    logprobs = draw(st.lists(numbers, min_size=len(ids), max_size=len(ids)))
    version = draw(st.integers(0, 5))
    versions = [version + (i > draw(st.integers(0, 5))) for i in range(len(ids))]
    return Completion(ids, logprobs, versions, draw(st.text(max_size=5)), draw(st.booleans()), "g")


@st.composite
def results(draw: st.DrawFn) -> ScoreResult:
    if draw(st.booleans()):
        failed = draw(st.sampled_from([None, InvalidReason.TIMEOUT]))
        components = draw(st.dictionaries(st.text(max_size=3), st.floats(-1, 1), max_size=2))
        return ScoredResult(id="r", valid=True, score=draw(st.floats(-2, 2)), components=components, failed_as=failed)
    return ScoreResult(id="r", valid=False, reason=draw(st.sampled_from(list(InvalidReason))), message="why")


@st.composite
def conversations(draw: st.DrawFn, prompt: Prompt, sample: int) -> Episode:
    """Several turns in several segments, with or without messages, as of a program that calls a completions API."""
    segments, turns = [prompt_segment(prompt)], list[Turn]()
    for number in range(draw(st.integers(0, 3))):
        if number and draw(st.booleans()):
            segments.append(empty_segment())
            segments[-1].append_context(draw(tokens))
        completion = draw(completions())
        segments[-1].append_sampled(completion, number)
        if draw(st.booleans()):
            segments[-1].append_context(draw(tokens))
        call = ToolCall("0", "add", {"a": 1}, seconds=0.5, tool="calculator")
        turns.append(Turn(completion.text, completion.truncated, draw(rewards), [call] * draw(st.integers(0, 1))))
    messages = [{"role": "user", "content": "?"}] if draw(st.booleans()) else []
    failure = None if turns else EpisodeFailure("user", "spec.agent.user", "timeout", "took: 9 s")
    return Episode(
        prompt.index,
        0,
        sample,
        segments,
        turns,
        "g",
        own_reward=draw(rewards),
        messages=messages,
        seat=draw(st.sampled_from(["", "first"])),
        trajectory=draw(st.integers(0, 2)),
        baseline=draw(st.sampled_from(["group", "episode"])),
        end=EpisodeEnd.RETURNED if turns else EpisodeEnd.FAILED,
        failure=failure,
        breaks=[ContextBreak("rewritten", "x")] * (len(segments) - 1),
    )


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    made = []
    order = draw(st.permutations(range(draw(st.integers(1, 3)))))
    for index, position in enumerate(order):
        prompt = Prompt(index, draw(st.text(max_size=4)), draw(tokens), draw(st.one_of(st.none(), st.just("42"))), "d")
        group = Group(index, prompt, [], TrainedAs(0, position // 2, position))
        for sample in range(2):
            is_single = draw(st.booleans())
            single = single_turn(prompt, index, sample, draw(completions()))
            episode = single if is_single else draw(conversations(prompt, sample))
            episode.group, episode.results = index, {} if episode.failure else {"correct": draw(results())}
            episode.score = draw(rewards)
            group.episodes.append(episode)
        made.append(group)
    return made


def values(episode: Episode) -> dict[str, Any]:
    """Return what an update reads of an episode."""
    arrays = [{name: array.tolist() for name, array in vars(each).items()} for each in episode.segments]
    scored = {
        name: (each.score, each.valid, each.reason, dict(each.components)) for name, each in episode.results.items()
    }
    turns = [(turn.text, turn.truncated, turn.reward, turn.tool_calls) for turn in episode.turns]
    rest = (episode.own_reward, episode.score, episode.generation, episode.end, str(episode.failure), episode.breaks)
    rest += (episode.seat, episode.position, episode.baseline)
    return {"segments": arrays, "results": scored, "turns": turns, "rest": rest, "messages": episode.messages}


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # no test here depends on it, and disks are slow


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(groups())
def test_what_was_written_is_read_in_the_order_of_training(
    tmp_path_factory: pytest.TempPathFactory, made: list[Group]
) -> None:
    path = tmp_path_factory.mktemp("log") / "step.parquet"
    write_file(path, "train", 1, made)
    found = read_groups(path)
    expected = sorted(made, key=lambda group: group.trained_as.position)  # type: ignore[union-attr]
    assert [(group.index, group.trained_as) for group in found] == [(each.index, each.trained_as) for each in expected]
    for group, before in zip(found, expected, strict=True):
        assert [values(each) for each in group.episodes] == [values(each) for each in before.episodes]
        assert group.prompt.token_ids == before.prompt.token_ids or not before.episodes[0].num_sampled
    again = path.with_name("again.parquet")
    write_file(again, "train", 1, sorted(found, key=lambda group: group.index))
    assert pq.read_table(again).to_pylist() == pq.read_table(path).to_pylist(), "a replay's log can be replayed"


def write(folder: Path, lane: Any = "train", trained_as: TrainedAs | None = TrainedAs(0, 0, 0)) -> Path:  # noqa: B008
    prompt, path = Prompt(0, "?", [1, 2]), folder / "step.parquet"
    episode = single_turn(prompt, 0, 0, Completion([3], [-0.1], [0], "a", truncated=False, generation="g"))
    write_file(path, lane, 1, [Group(0, prompt, [episode], trained_as)])
    return path


def test_logprobs_are_exact(tmp_path: Path) -> None:
    [group] = read_groups(write(tmp_path))
    [segment] = group.episodes[0].segments
    assert segment.logprobs.tolist() == [0.0, 0.0, float(np.float32(-0.1))]
    assert segment.versions.tolist() == [NOT_SAMPLED, NOT_SAMPLED, 0]


def test_evaluation_has_no_tokens_and_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, lane="eval")
    assert pq.read_table(path)["token_ids"].null_count == 1, "no one trains on it: its bytes are saved"
    with pytest.raises(UserError, match="only steps of training"):
        read_groups(path)


def test_log_of_a_version_that_did_not_record_tokens_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path)
    pq.write_table(pq.read_table(path).drop_columns(["part", "logprobs"]), path)
    with pytest.raises(UserError, match=r"has no part, logprobs: .*run the job again"):
        read_groups(path)


@pytest.mark.parametrize("content", [b"", b"PAR1 no"])
def test_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read: .*--steps"):
        read_groups(tmp_path / "step.parquet")


def test_file_of_another_format_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "step.parquet")
    with pytest.raises(UserError, match="another version of RLJob"):
        read_groups(tmp_path / "step.parquet")


def test_rewards_without_a_result_are_found(tmp_path: Path) -> None:
    found = read_groups(write(tmp_path))
    assert find_unscored(found, ["style"]) == {"style"}
    assert find_unscored(found, []) == set()
