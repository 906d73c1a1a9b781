"""The trajectory log: rows; complete files within the limit, written in a thread; one history after deaths."""

import asyncio
import json
import random
import threading

import pyarrow.parquet as pq
import pytest

from rljob_api.run.folder import TRAJECTORIES, list_trajectory_files, trajectory_file
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreResult
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import (
    ContextBreak,
    Episode,
    EpisodeEnd,
    EpisodeFailure,
    Group,
    ScoredResult,
    Segment,
    ToolCall,
    Turn,
)
from rljob_trainer.history import trajectory_log
from rljob_trainer.history.trajectory_log import TrajectoryLog
from tests.support.episodes import episode


def sample(index, group=0, *, text="42", score=1.0, advantage=0.5, **results):
    return episode(
        [1, 2, 3, 4], [0, 0, 1, 1], index=(7, group, index), text=text, version=3,
        results=results, score=score, advantage=advantage,
    )  # fmt: skip


def valid(score, **fields):
    return ScoredResult(id="x", valid=True, score=score, **fields)


def group_of(*episodes, prompt="6 x 7?"):
    return Group(0, Prompt(7, prompt, [1, 2], ground_truth=42, data_source="gsm8k"), list(episodes))


async def write(folder, *groups, step=3, lane="train", max_mib=1):
    log = TrajectoryLog(folder, max_mib << 20)
    log.record(lane, step, groups)
    await log.flush()
    await log.close()
    path = trajectory_file(folder, step, lane)
    return pq.read_table(path).to_pylist() if path.exists() else None


def turn(text, **fields):
    empty = {"reward": None, "advantage": None, "truncated": False, "user_seconds": None, "user_info": None}
    return {"text": text, **empty, "tool_calls": [], **fields}


def segment(num_tokens, spans, cause=None, difference=None):
    named = [dict(zip(("start", "end", "turn", "text"), span, strict=True)) for span in spans]
    return {"num_tokens": num_tokens, "cause": cause, "difference": difference, "spans": named}


async def test_row_contains_everything_about_a_sample(tmp_path):
    result = valid(
        1.0, components={"exact": 1.0}, version="v1", attempts=2, queue_seconds=0.5, execute_seconds=0.25,
        latency_seconds=3.0,
    )  # fmt: skip
    [row] = await write(tmp_path, group_of(sample(0, correct=result)))
    [reward] = row.pop("rewards")
    assert row == {
        "step": 3, "lane": "train", "group": 0, "sample": 0, "prompt_index": 7, "data_source": "gsm8k",
        "prompt": "6 x 7?", "ground_truth": "42", "completion": "42", "truncated": False, "num_tokens": 4,
        "num_sampled_tokens": 2, "weights": "g:3", "score": 1.0, "advantage": 0.5,
        "end": "answered", "failure": None, "messages": None, "state": None, "own_reward": None, "info": None,
        "ignored": [], "turns": None, "segments": None, "seat": None, "trajectory": 0,
        "within_episode": False, "set": None, "update": None, "part": None, "position": None,
        "token_ids": [1, 2, 3, 4], "logprobs": [-1.0, -1.0], "versions": [3, 3],
    }  # fmt: skip
    assert reward == {
        "name": "correct", "valid": True, "score": 1.0, "components": [("exact", 1.0)], "reason": None, "message": "",
        "version": "v1", "attempts": 2, "queue_seconds": 0.5, "execute_seconds": 0.25, "latency_seconds": 3.0,
    }  # fmt: skip


async def test_conversation_has_turns_calls_and_spans_of_each_segment(tmp_path):
    call = ToolCall("0", "add", {"a": 1}, seconds=0.5, tool="calculator")
    unknown = ToolCall("1", "subtract", None, error="there is no function subtract")
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "b"}]
    conversation = Episode(
        7, 0, 0,
        [Segment([1, 2, 3, 4, 5], [0, 1, 0, 1, 1], [0.0] * 5, [0] * 5, [-1, 0, -1, 1, 1]),
         Segment([6, 7], [0, 1], [0.0] * 2, [0] * 2, [-1, 2])],
        [Turn("a", tool_calls=[call, unknown]),
         Turn("b", reward=-0.5, user_seconds=0.25, user_info={"n": 1}),
         Turn("c")],
        messages=messages, state={"turn": 1}, end=EpisodeEnd.FAILED,
        failure=EpisodeFailure("user", "spec.agent.user", "timeout", "took 9 s"),
        breaks=[ContextBreak("history rewritten", "<think>")],
    )  # fmt: skip
    log = TrajectoryLog(tmp_path, 1 << 20, decode=lambda token_ids: "".join(map(str, token_ids)))
    log.record("train", 3, [group_of(conversation)])
    await log.close()
    [row] = pq.read_table(trajectory_file(tmp_path, 3, "train")).to_pylist()
    assert (row["end"], row["failure"]) == ("failed", "spec.agent.user: timeout: took 9 s")
    assert (row["messages"], row["state"]) == (json.dumps(messages), '{"turn": 1}')
    add = {"id": "0", "name": "add", "tool": "calculator", "arguments": '{"a": 1}', "error": None, "seconds": 0.5}
    subtract = {"id": "1", "name": "subtract", "tool": None, "arguments": None, "seconds": 0.0}
    assert row["turns"] == [
        turn("a", tool_calls=[add, {**subtract, "error": "there is no function subtract"}]),
        turn("b", reward=-0.5, user_seconds=0.25, user_info='{"n": 1}'),
        turn("c"),
    ]
    assert row["segments"] == [
        segment(5, [(0, 1, -1, "1"), (1, 2, 0, "2"), (2, 3, -1, "3"), (3, 5, 1, "45")]),
        segment(2, [(0, 1, -1, "6"), (1, 2, 2, "7")], "history rewritten", "<think>"),
    ]


async def test_invalid_result_has_a_reason_and_no_score(tmp_path):
    result = ScoredResult(id="x", valid=False, reason=InvalidReason.TIMEOUT, message="too long", attempts=3)
    [row] = await write(tmp_path, group_of(sample(0, score=None, advantage=None, correct=result)))
    assert (row["score"], row["advantage"]) == (None, None)
    [reward] = row["rewards"]
    assert (reward["valid"], reward["score"], reward["reason"], reward["attempts"]) == (False, None, "timeout", 3)


async def test_components_may_differ_between_samples(tmp_path):
    rows = await write(
        tmp_path,
        group_of(
            sample(0, correct=valid(1.0, components={"exact": 1.0})),
            sample(1, correct=valid(0.0)),
            sample(2, correct=valid(0.5, components={"steps": 4.0, "Länge/é": 1.0}), style=valid(2.0)),
        ),
    )
    found = [{r["name"]: dict(r["components"]) for r in row["rewards"]} for row in rows]
    assert found == [
        {"correct": {"exact": 1.0}},
        {"correct": {}},
        {"correct": {"steps": 4.0, "Länge/é": 1.0}, "style": {}},
    ]


async def test_conversation_is_json_and_lone_surrogates_are_replaced(tmp_path):
    messages = [{"role": "user", "content": "6 x 7?"}]
    [row] = await write(tmp_path, group_of(sample(0, text="4\ud83d2", correct=valid(1.0)), prompt=messages))
    assert row["prompt"] == '[{"role": "user", "content": "6 x 7?"}]'
    assert row["completion"] == "4?2"


async def test_repeated_step_replaces_its_file(tmp_path):
    await write(tmp_path, group_of(sample(0, correct=valid(1.0)), sample(1, correct=valid(1.0))))
    rows = await write(tmp_path, group_of(sample(0, text="new", correct=valid(0.0))))
    assert [row["completion"] for row in rows] == ["new"]
    assert [file.name for file in (tmp_path / "trajectories").iterdir()] == ["step-000003.train.parquet"]


async def test_interrupted_write_keeps_the_previous_file(tmp_path, monkeypatch):
    before = await write(tmp_path, group_of(sample(0, correct=valid(1.0))))

    def die(descriptor):
        raise OSError("the node failed")

    monkeypatch.setattr("os.fsync", die)
    with pytest.raises(OSError, match="the node failed"):
        await write(tmp_path, group_of(sample(0, text="new", correct=valid(0.0))))
    [file] = list_trajectory_files(tmp_path / TRAJECTORIES)
    assert pq.read_table(file.path).to_pylist() == before


async def test_training_and_evaluation_of_a_step_have_separate_files(tmp_path):
    await write(tmp_path, group_of(sample(0)), lane="train")
    await write(tmp_path, group_of(sample(0)), lane="eval")
    assert [(file.step, file.lane) for file in list_trajectory_files(tmp_path / TRAJECTORIES)] == [
        (3, "eval"),
        (3, "train"),
    ]


async def test_log_can_be_disabled(tmp_path):
    assert await write(tmp_path, group_of(sample(0)), max_mib=0) is None


async def test_oldest_steps_are_deleted_first_and_the_newest_stays(tmp_path):
    draw = random.Random(0)
    noise = "".join(map(chr, draw.choices(range(0x4E00, 0x9FFF), k=200_000)))  # about 470 kB per file
    log = TrajectoryLog(tmp_path, 1 << 20)
    for step in range(1, 6):
        log.record("train", step, [group_of(sample(0, text=noise))])
    log.record("train", 6, [group_of(*(sample(i, text=noise[i:] + noise[:i]) for i in range(4)))])
    await log.flush()
    [newest] = list_trajectory_files(tmp_path / TRAJECTORIES)
    assert newest.step == 6
    log.record("train", 7, [group_of(sample(0, text=noise))])
    log.record("train", 8, [group_of(sample(0, text=noise))])
    await log.flush()
    await log.close()
    assert [file.step for file in list_trajectory_files(tmp_path / TRAJECTORIES)] == [7, 8]
    assert sum(file.path.stat().st_size for file in list_trajectory_files(tmp_path / TRAJECTORIES)) <= 1 << 20


async def test_event_loop_runs_while_a_step_is_written(tmp_path, monkeypatch):
    writing, may_end = threading.Event(), threading.Event()

    def slow(*_):
        writing.set()
        assert may_end.wait(30)

    monkeypatch.setattr(trajectory_log, "write_file", slow)
    log = TrajectoryLog(tmp_path, 1 << 20)
    log.record("train", 1, [group_of(sample(0))])
    await asyncio.to_thread(writing.wait, 30)
    flush = asyncio.create_task(log.flush())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not flush.done(), "a checkpoint waits for the file"
    may_end.set()
    await flush
    await log.close()


async def test_cancelled_flush_leaves_the_files_to_the_next_one(tmp_path, monkeypatch):
    """A signal cancels a checkpoint that waits for the log. The checkpoint before exit must wait for the log, too."""
    may_end, original_write = threading.Event(), trajectory_log.write_file

    def slow(*args):
        assert may_end.wait(30)
        original_write(*args)

    monkeypatch.setattr(trajectory_log, "write_file", slow)
    log = TrajectoryLog(tmp_path, 1 << 20)
    for lane in ("train", "eval"):
        log.record(lane, 3, [group_of(sample(0))])
    flushes = [asyncio.create_task(log.flush()) for _ in range(2)]
    for flush in flushes:
        await asyncio.sleep(0)
        flush.cancel()
    await asyncio.gather(*flushes, return_exceptions=True)
    flush = asyncio.create_task(log.flush())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not flush.done()
    may_end.set()
    await flush
    assert [file.lane for file in list_trajectory_files(tmp_path / TRAJECTORIES)] == ["eval", "train"]
    await log.close()


async def test_file_that_found_the_disk_full_is_written_again(tmp_path, monkeypatch):
    attempts, original_write = [], trajectory_log.pq.write_table

    def full_at_first(*args, **settings):
        attempts.append(args)
        if len(attempts) <= 2:
            raise OSError(28, "No space left on device")
        original_write(*args, **settings)

    monkeypatch.setattr(trajectory_log.pq, "write_table", full_at_first)
    rows = await write(tmp_path, group_of(sample(0)))
    assert (len(rows), len(attempts)) == (1, 3)


async def test_sample_outside_the_schema_costs_only_its_step(tmp_path, caplog):
    assert await write(tmp_path, group_of(sample(0, score="not a number"))) is None
    assert "this step is missing in the trajectory log" in caplog.text


async def test_log_contains_the_advantages_of_the_updates(make_harness):
    async with make_harness(schedule={"steps": 1}) as harness:
        harness.judge = lambda reward, body: (
            ScoreResult(id=body["id"], valid=False, reason=InvalidReason.ABSTAINED)
            if body["id"].endswith("/2/1")
            else None
        )
        await harness.run()
    rows = {key: row for key, row in harness.trajectories().items() if key[1] == "train"}
    updated = sorted((row for rows in harness.updates for row in rows), key=lambda row: row.episode)
    used = [row.advantages[row.loss_mask].mean() if row.loss_mask.any() else None for row in updated]
    found = [row.advantage for _, row in sorted(rows.items())]
    assert found == [None if each is None else pytest.approx(each) for each in used]
    masked = rows[1, "train", 2, 1]
    assert (masked.advantage, masked.score, masked.rewards[0].reason) == (None, None, "abstained")
    assert all(row.rewards[0].attempts == 1 for row in rows.values())
