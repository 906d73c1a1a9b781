"""`rljob test-agent --completion` with the real servers of the user, the tools and the rewards, and the real loop."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from typer.testing import CliRunner

from rljob_cli.main import app
from tests.paths import EXAMPLES
from tests.support.fake_endpoint import Endpoint, completion
from tests.support.judge_servers import new_address
from tests.support.model_folder import write_model
from tests.support.modules import load_module

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": %s}}</tool_call>'


WITHOUT_PACKAGES = ["--set", "spec.agent.runner.function.requirements=[]"]
"""openai is installed: no package index is needed."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "model", {"max_position_embeddings": 4096})


@pytest.fixture
def play(tmp_path, model):
    """Write the job of `rljob init --agent`, and play the given answers on its first row."""

    def run(*answers, agent="loop", options=(), **files):
        folder = tmp_path / "mine"
        init = CliRunner().invoke(app, ["init", str(folder), "--gpus", "0", "--agent", agent, "--model", str(model)])
        assert init.exit_code == 0, init.output
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        return play_job(folder / "rljob.yaml", answers, options)

    return run


def play_job(job, answers, options):
    sizes = ["--set", "spec.rollout.maxModelLen=4096", "--set", "spec.rollout.sampling.maxTokens=512"]
    arguments = [part for answer in answers for part in ("--completion", answer)]
    done = CliRunner().invoke(app, ["test-agent", str(job), *arguments, *sizes, *options, "-o", "json"])
    assert done.stdout, done.output
    return done.exit_code, json.loads(done.stdout)


def test_written_job_plays_calls_replies_and_rewards(play):
    code, found = play(CALL % 11, "It is 132.", "121")
    [episode] = found["episodes"]
    assert (code, episode["end"], episode["failure"]) == (0, "user", None)
    calls, first, right = episode["turns"]
    [call] = calls["tool_calls"]
    assert (call["name"], call["tool"], call["error"]) == ("multiply", "calculator", None)
    assert (first["reward"], json.loads(first["user_info"])) == (-0.02, {"feedback": "too high"})
    assert right["reward"] == 0.0
    roles = [(message["role"], message["content"]) for message in json.loads(episode["messages"])][1:]
    assert roles[1:] == [
        ("tool", "132"), ("assistant", "It is 132."), ("user", "132 is too high. Try again."), ("assistant", "121"),
    ]  # fmt: skip
    [reward] = episode["rewards"]
    assert reward["components"] == {"exact": 1.0, "last": 1.0, "called": 1.0, "turns": 3.0}
    [segment] = episode["segments"]
    assert [span["turn"] for span in segment["spans"] if span["turn"] >= 0] == [0, 1, 2]


def test_user_that_raises_is_an_invalid_episode_with_its_line(play):
    code, found = play("7", user="def respond(messages, state):\n    raise KeyError('mood')\n")
    [episode] = found["episodes"]
    assert (code, episode["end"], episode["rewards"]) == (1, "failed", [])
    assert "spec.agent.user: exception" in episode["failure"]
    assert "user.py:2" in episode["failure"]
    assert "mood" in episode["failure"]


def test_chat_model_plays_the_user_and_ends_the_conversation(play):
    """A fake endpoint: the real server of the user asks it."""
    endpoint = Endpoint(new_address())
    replies = {"It is 132.": "That is too high.", "121": "Thank you! [DONE]"}
    endpoint.reset(lambda body, number: completion(replies[body["messages"][-1]["content"]]))
    access = {"url": endpoint.url, "model": "gpt-user"}
    user = {"model": {"endpoint": access, "persona": "You want {{ ground_truth }}, then [DONE].", "stop": "[DONE]"}}
    code, found = play(CALL % 11, "It is 132.", "121", options=["--set", f"spec.agent.user={json.dumps(user)}"])
    endpoint.close()
    [episode] = found["episodes"]
    assert (code, episode["end"], episode["failure"]) == (0, "user", None)
    _, first, last = episode["turns"]
    assert (first["reward"], first["user_info"]) == (None, None)
    assert json.loads(last["user_info"]) == {"last_message": "Thank you! [DONE]"}
    roles = [(message["role"], message["content"]) for message in json.loads(episode["messages"])]
    assert roles[-2:] == [("user", "That is too high."), ("assistant", "121")]
    assert endpoint.requests[0]["messages"][0] == {"role": "system", "content": "You want 121, then [DONE]."}
    assert [message["content"] for message in endpoint.requests[1]["messages"][-3:]] == [
        "It is 132.", "That is too high.", "121"
    ]  # fmt: skip


def test_code_that_the_policy_writes_runs_in_the_sandbox_of_the_example(model):
    call = '<tool_call>{"name": "run_python", "arguments": {"code": "49**2 + 72**2 + 56**2"}}</tool_call>'
    job, options = EXAMPLES / "code-sandbox" / "rljob.yaml", ["--set", f"spec.model.source={model}"]
    code, found = play_job(job, [call, "10721"], options)
    [episode] = found["episodes"]
    assert (code, episode["end"], episode["failure"]) == (0, "answered", None)
    [message] = [message for message in json.loads(episode["messages"]) if message["role"] == "tool"]
    assert (message["name"], message["content"]) == ("run_python", "10721")
    assert episode["rewards"][0]["components"] == {"right": 1.0, "computed": 1.0, "called": 1.0}


def test_written_program_tries_again_with_exact_tokens_and_returns_its_reward(play):
    code, found = play("It is 3.", "2", agent="program", options=WITHOUT_PACKAGES)
    [episode] = found["episodes"]
    assert (code, episode["end"], episode["failure"]) == (0, "returned", None)
    assert (episode["score"], episode["own_reward"], json.loads(episode["info"])) == (1.0, 1.0, {"wrong": 1})
    assert [(turn["text"], turn["reward"]) for turn in episode["turns"]] == [("It is 3.", -0.05), ("2", None)]
    roles = [(message["role"], message["content"]) for message in json.loads(episode["messages"])]
    assert roles[1:] == [("assistant", "It is 3."), ("user", "3 is wrong. Try again."), ("assistant", "2")]
    [segment] = episode["segments"]
    assert [span["turn"] for span in segment["spans"]] == [-1, 0, -1, 1]


def test_written_environment_replies_and_rewards_its_answers(play):
    code, found = play("It is 3.", "2", agent="environment")
    [episode] = found["episodes"]
    assert (code, episode["end"], episode["failure"]) == (0, "returned", None)
    assert [(turn["text"], turn["reward"]) for turn in episode["turns"]] == [("It is 3.", -0.05), ("2", 1.0)]
    assert json.loads(episode["info"]) == {"scores": 1.0}
    [segment] = episode["segments"]
    assert [span["turn"] for span in segment["spans"]] == [-1, 0, -1, 1]


def test_row_that_the_environment_makes_is_played(model):
    job = EXAMPLES / "environment" / "rows.yaml"
    options = ["--set", f"spec.model.source={model}", "--row", "2"]
    code, found = play_job(job, ["35"], options)
    [episode] = found["episodes"]
    [row] = islice(load_module(EXAMPLES / "environment" / "environment.py").rows("train"), 2, 3)
    assert (code, episode["ground_truth"]) == (0, row["answer"]), episode["failure"]
    assert row["question"] in episode["prompt"]


def test_example_plays_when_a_command_starts_it(model):
    """As a function, it is played by the tests of the examples."""
    runner = json.dumps({"command": ["python", "agent.py"], "workingDir": "."})
    options = ["--set", f"spec.agent.runner={runner}", "--set", f"spec.model.source={model}"]
    code, found = play_job(EXAMPLES / "program" / "rljob.yaml", ["It is 40.", "28"], options)
    [episode] = found["episodes"]
    assert (code, episode["end"], episode["failure"]) == (0, "returned", None)
    assert (episode["own_reward"], json.loads(episode["info"])) == (1.0, {"right": True, "first": False, "answers": 2})
    assert [turn["reward"] for turn in episode["turns"]] == [-0.05, None]
