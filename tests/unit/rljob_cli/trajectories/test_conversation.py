"""Conversations of the trajectory log as `rljob trajectories` shows them, over logs as the trainer writes them."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rljob_api.run.folder import trajectory_file
from rljob_api.wire.base import Message
from rljob_cli.main import app
from rljob_cli.trajectories.conversation import _build_rewards, _is_answer
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import (
    Completion,
    ContextBreak,
    Episode,
    EpisodeEnd,
    EpisodeFailure,
    Group,
    ScoredResult,
    ToolCall,
    Turn,
    empty_segment,
)
from rljob_trainer.history.trajectory_log import write_file
from tests.support.records import sample_row

PROMPT: list[Message] = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "What is 17 + 14?"},
]
TEXTS = {1: "<prompt>\n", 2: "30<end>", 3: "<too low>", 4: "31<end>", 5: "<shorter>"}


def sampled(token: int, text: str) -> Completion:
    return Completion([token], [-1.0], [3], text, False, "g")


def conversation(**fields: object) -> Episode:
    """Two turns after a prompt with an earlier answer: a tool call, and a right answer in a new segment."""
    first, second = empty_segment(), empty_segment()
    first.append_context([1])
    first.append_sampled(sampled(2, "30"), turn=0)
    first.append_context([3])
    second.append_context([5])
    second.append_sampled(sampled(4, "31"), turn=1)
    calls = [
        ToolCall("0", "add", {"a": 17}, seconds=0.012, tool="calculator"),
        ToolCall("1", "subtract", None, error="there is no function subtract"),
    ]
    turns = [
        Turn(
            "30", reward=-0.1, tool_calls=calls, user_seconds=0.003, user_info={"feedback": "too low"}, advantage=-0.5
        ),
        Turn("31", reward=0.0, advantage=0.5),
    ]
    messages = [
        *PROMPT,
        {"role": "assistant", "content": "30"},
        {"role": "tool", "name": "add", "content": "31"},
        {"role": "user", "content": "30 is too low."},
        {"role": "assistant", "content": "31"},
    ]
    given = {
        "segments": [first, second],
        "turns": turns,
        "generation": "g",
        "results": {"correct": ScoredResult(id="x", valid=True, score=1.25, components={"first": 0.0})},
        "score": 1.25,
        "advantage": 0.1,
        "messages": messages,
        "state": {"tries": 2},
        "end": EpisodeEnd.USER,
        "breaks": [ContextBreak("the template rewrites earlier messages", "<too low>")],
    }
    return Episode(0, 0, 0, **given | fields)  # type: ignore[arg-type]


@pytest.fixture
def show(tmp_path):
    """Write episodes as the log of step 1, and return what the command prints."""

    def run(*arguments: str, episodes: list[Episode] | None = None) -> str:
        group = Group(0, Prompt(0, PROMPT, [1], ground_truth="31"), episodes or [conversation()])
        path = trajectory_file(tmp_path, 1, "train")
        write_file(path, "train", 1, [group], lambda ids: "".join(TEXTS[token] for token in ids))
        done = CliRunner().invoke(app, ["trajectories", str(tmp_path), *arguments], env={"COLUMNS": "160"})
        assert done.exit_code == 0, done.output
        return done.output

    return run


def test_conversation_shows_roles_calls_replies_and_rewards_of_turns(show):
    lines = [" ".join(line.split()) for line in show().splitlines()]
    assert lines == [
        "step 1 train, sample 0/0 | 2 turns, ended by user | score 1.25 | with the rewards of its turns 1.15 | "
        "advantage 0.1 | answer: 31 | "
        "2 of 5 tokens sampled | weights g:3",
        "correct: 1.25, first 0, 0 ms",
        'state: {"tries": 2}',
        "user 1 + 1?",
        "assistant 2",
        "user What is 17 + 14?",
        ">> assistant 30",
        'calls add({"a": 17}), tool calculator, 12 ms',
        "calls subtract(arguments that are not a JSON object)",
        "failed: there is no function subtract",
        'reward -0.1, advantage -0.5, user 3 ms, {"feedback": "too low"}',
        "tool add 31",
        "user 30 is too low.",
        "a new segment: the template rewrites earlier messages; first difference: <too low>",
        ">> assistant 31",
        "reward 0, advantage 0.5",
        "",
        ">> changed the policy, > sampled only (evaluation, or no advantage but 0); else context",
    ]


def test_tokens_show_each_span_of_each_segment_with_its_mark(show):
    lines = [" ".join(line.split()) for line in show("--tokens").splitlines()]
    assert lines[3:9] == [
        "1:0-0 context <prompt>\\n",
        "1:1-1 >> turn 1 30<end>",
        "1:2-2 context <too low>",
        "a new segment: the template rewrites earlier messages; first difference: <too low>",
        "2:0-0 context <shorter>",
        "2:1-1 >> turn 2 31<end>",
    ]


@pytest.mark.parametrize("advantage", [None, 0.0])
def test_answer_without_an_advantage_is_marked_as_not_trained(show, advantage):
    """A group with equal scores has the advantage 0, which changes no weight."""
    turns = [Turn("30"), Turn("31", truncated=True)]
    output = show(episodes=[conversation(turns=turns, advantage=advantage)])
    assert [line.split()[:3] for line in output.splitlines() if line.startswith(">")][:2] == [
        [">", "assistant", "30"],
        [">", "assistant", "31"],
    ]
    assert "31 [truncated]" in output


def test_failed_episode_is_listed_as_invalid_with_its_reason(show):
    failure = EpisodeFailure("user", "spec.agent.user", "timeout", "killed after 30 s")
    prompt = empty_segment()
    prompt.append_context([1])
    failed = conversation(
        turns=[], segments=[prompt], breaks=[], messages=PROMPT, results={}, score=None, failure=failure
    )
    failed.end = EpisodeEnd.FAILED
    output = show("--invalid", episodes=[failed, conversation()])
    assert output.count("ended by") == 1
    assert "invalid: spec.agent.user: timeout: killed after 30 s" in output
    assert "weights" not in output, "nothing was sampled"
    assert show("--reward", "correct", episodes=[failed, conversation()]).count("ended by") == 1
    assert show("--min-score", "0", episodes=[failed, conversation()]).count("ended by") == 1


def test_a_few_conversations_are_shown_unless_the_limit_says_otherwise(show):
    episodes = [conversation() for _ in range(7)]
    assert show(episodes=episodes).count("ended by") == 5
    assert "the first 5; more with --limit (0: all)" in show(episodes=episodes)
    assert show("--limit", "0", episodes=episodes).count("ended by") == 7


def hosted(**fields):
    """Two drafts of one answer and a choice, as a program samples them: the drafts are branches of the prompt."""
    segments, turns = [], []
    for number, (token, text) in enumerate(((2, "30"), (4, "31"), (4, "31"))):
        segment = empty_segment()
        segment.append_context([1, 3] if number == 2 else [1])
        segment.append_sampled(sampled(token, text), turn=number)
        segments.append(segment)
        turns.append(Turn(text, reward=-0.1 if number == 0 else None))
    messages = [*PROMPT, {"role": "assistant", "content": "31"}, {"role": "user", "content": "Sure?"}]
    messages.append({"role": "assistant", "content": "31"})
    breaks = [ContextBreak("branch", "<too low>"), ContextBreak("unmatched")]
    given = {"segments": segments, "turns": turns, "breaks": breaks, "messages": messages}
    return conversation(**given | {"results": {}, "end": EpisodeEnd.RETURNED, "own_reward": 1.0} | fields)


def test_branches_of_a_program_are_shown_with_the_answers_of_all(show):
    lines = [" ".join(line.split()) for line in show(episodes=[hosted()]).splitlines()]
    assert "ended by returned" in lines[0]
    assert lines[1:-2] == [
        "runner's reward: 1",
        'state: {"tries": 2}',
        "user 1 + 1?",
        "assistant 2",
        "user What is 17 + 14?",
        "a new segment: branch; first difference: <too low>",
        "> assistant 31",
        "user Sure?",
        "a new segment: unmatched",
        "> assistant 31",
        "> assistant (turn 1, elsewhere) 30",
        "reward -0.1",
    ]


@pytest.mark.parametrize(
    ("message", "text", "is_answer"),
    [
        ({"content": "31"}, "31\n", True),
        ({"content": [{"type": "text", "text": "31"}]}, "31", True),
        ({"content": "1"}, "31", False),
        ({"content": "31"}, "<think>14 + 17</think>\n31", True),
        ({"content": None, "tool_calls": [{}]}, '<tool_call>{"name": "add"}</tool_call>', True),
        ({"content": None}, "31", False),
    ],
)
def test_message_is_an_answer_even_without_its_calls_and_reasoning(message, text, is_answer):
    assert _is_answer(message, text) is is_answer


def test_rewards_and_info_of_the_agent_are_shown():
    row = sample_row(own_reward=0.5, state="{}", info='{"wrong": 1}', ignored=["seed", "tools.web_search"])
    assert [line.renderable.plain for line in _build_rewards(row)] == [
        "runner's reward: 0.5", 'info: {"wrong": 1}', "ignored in requests: seed, tools.web_search"
    ]  # fmt: skip


def test_conversation_as_json_has_the_columns_of_the_log(show):
    [row] = [json.loads(line) for line in show("-o", "json").splitlines()]
    assert (row["end"], len(row["turns"]), len(row["segments"])) == ("user", 2, 2)
    assert [message["role"] for message in json.loads(row["messages"])][-1] == "assistant"


def test_log_without_the_columns_of_conversations_is_read(tmp_path):
    path = trajectory_file(tmp_path, 1, "train")
    write_file(path, "train", 1, [Group(0, Prompt(0, "1 + 1?", [1]), [conversation(messages=[])])])
    table = pq.read_table(path).drop_columns(["end", "failure", "messages", "state", "turns", "segments"])
    pq.write_table(table, path)
    done = CliRunner().invoke(app, ["trajectories", str(tmp_path)], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "1 + 1?" in done.output
