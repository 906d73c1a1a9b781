"""`rljob run` with conversations: real vLLM, trainers, simulated user, tool and reward. Tokens are exact over turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics
from tests.paths import ROOT
from tests.support.local_run import find_tracebacks, run_to_end

pytestmark = pytest.mark.real

RLJOB = Path(sys.executable).with_name("rljob")
TINY = ROOT / ".models" / "tiny-qwen3"
RUN_SECONDS = 540
USER = """
def respond(messages, state, answer):
    state["tries"] = state.get("tries", 0) + 1
    vowels = sum(letter in "aeiou" for letter in messages[-1]["content"])
    return None if vowels > 6 else f"Only {vowels} vowels; the answer is {answer}.", vowels / 10, {"vowels": vowels}
"""
TOOL = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return a + b
'''
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    turns = extra_info["turns"]
    assert [turn["text"] for turn in turns][-1] == solution_str
    assert len(extra_info["messages"]) >= 2 * len(turns)
    return {"score": solution_str.count("e") / 10, "turns": len(turns), "tries": extra_info["state"].get("tries", 0)}
"""


def write_job(folder: Path) -> Path:
    job = yaml.safe_load((ROOT / "examples/tiny/rljob.yaml").read_text())
    for name, source in (("user.py", USER), ("tool.py", TOOL), ("reward.py", REWARD)):
        (folder / name).write_text(source)
    data = ROOT / "examples/quickstart/data"
    spec = job["spec"]
    spec["model"]["source"] = str(TINY)
    spec["data"] = {
        "train": {"source": str(data / "train.jsonl"), "prompt": "question"},
        "eval": {"source": str(data / "eval.jsonl"), "prompt": "question", "limit": 8},
        "format": "chat",
    }
    spec["agent"] = {
        "completion": "last",
        "type": "loop",
        "maxAssistantTurns": 3,
        "user": {"function": {"file": "user.py"}, "slots": 2},
        "tools": [{"name": "calc", "function": {"file": "tool.py"}, "slots": 1}],
    }
    # A random model seldom writes its end token: a letter ends most answers.
    spec["rollout"] |= {"maxModelLen": 1024, "sampling": {"maxTokens": 48, "stop": ["r"]}}
    spec["schedule"] = {"steps": 2, "promptsPerStep": 4}
    spec["trainer"]["replicas"] = 1
    path = folder / "rljob.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


@pytest.mark.slow
def test_conversations_with_user_and_tool_train_on_exactly_the_sampled_tokens(tmp_path: Path) -> None:
    done = run_to_end(write_job(tmp_path), tmp_path, RUN_SECONDS)
    assert done.returncode == 0, done.stdout
    assert not find_tracebacks(tmp_path / "tiny"), "a healthy run"
    steps = read_metrics(tmp_path / "tiny" / FILE_METRICS).steps
    assert len(steps) == 2
    for step in steps:
        agent = step.agent
        assert (step.num_invalid, agent.failures) == (0, {})
        assert agent.turns_mean > 1
        assert agent.turn_reward_mean > 0
        assert agent.user_seconds_mean > 0
        assert sum(agent.episodes_by_end.values()) == 16
        assert step.components["turns"] == agent.turns_mean, "the reward sees the turns"
        assert step.logprob_difference < 1e-4, "the trainer computes the log-probs of the same tokens"
    check_trajectories(tmp_path / "tiny" / "trajectories" / "step-000001.train.parquet")


def check_trajectories(path: Path) -> None:
    rows = pq.read_table(path).to_pylist()
    talks = [row for row in rows if len(row["turns"]) > 1]
    assert talks
    assert any(row["advantage"] for row in talks)
    for row in talks:
        spans = [span for segment in row["segments"] for span in segment["spans"]]
        assert [span["turn"] for span in spans if span["turn"] >= 0] == list(range(len(row["turns"])))
        assert '"name": "add"' in spans[0]["text"], "the model sees the schema of the tool"
        context = "".join(span["text"] for span in spans if span["turn"] < 0)
        assert "vowels; the answer is" in context
        assert sum(span["end"] - span["start"] for span in spans if span["turn"] >= 0) == row["num_sampled_tokens"]
        roles = [message["role"] for message in json.loads(row["messages"])]
        assert roles.count("assistant") == len(row["turns"])
