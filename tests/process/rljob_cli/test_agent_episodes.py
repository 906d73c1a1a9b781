"""`rljob test-agent --answer` with the real servers of the user, the tools and the rewards, and the real loop."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rljob_cli.main import app
from tests.support.model_folder import write_model

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": %s}}</tool_call>'


@pytest.fixture
def play(tmp_path):
    """Write the job of `rljob init --agent loop`, and play the given answers on its first row: 11 * 11."""
    folder = tmp_path / "mine"
    model = write_model(tmp_path / "model", {"max_position_embeddings": 4096})
    # transformers, unlike the tokenizers library, does not read the end token as an object.
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    init = CliRunner().invoke(app, ["init", str(folder), "--agent", "loop", "--model", str(model)])
    assert init.exit_code == 0, init.output

    def run(*answers, **files):
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        options = [
            "--set",
            "spec.rollout.maxModelLen=4096",
            "--set",
            "spec.rollout.sampling.maxTokens=512",
            "-o",
            "json",
        ]
        arguments = [part for answer in answers for part in ("--answer", answer)]
        done = CliRunner().invoke(app, ["test-agent", str(folder / "rljob.yaml"), *arguments, *options, "-o", "json"])
        assert done.stdout, done.output
        return done.exit_code, json.loads(done.stdout)

    return run


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
