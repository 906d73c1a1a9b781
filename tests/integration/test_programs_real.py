"""`rljob run` of a program on OpenAI's SDK: real vLLM, trainers, gateway and runner, whose server is killed meanwhile.

Some of the episodes raise, end without a call, or use the key of an ended episode. All others train on exactly the
tokens that the program saw.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics
from tests.paths import ROOT
from tests.support.local_run import Run

pytestmark = pytest.mark.real

TINY = ROOT / ".models" / "tiny-qwen3"
PROGRAM = '''
from openai import APIStatusError, OpenAI

ENDED = []  # the client of an earlier episode of this process, which returned


def run(messages, episode, attempt):
    late = call_late() if ENDED else None
    client = OpenAI()
    kind = find_kind(episode)
    if kind == "silent":
        return 1.0
    messages, answers = list(messages), []
    for question in ("Again.", None):
        answers.append(client.chat.completions.create(model="policy", messages=messages, logprobs=True))
        message = answers[-1].choices[0].message
        messages += [message, {"role": "user", "content": question}]
    if kind == "raises" or (kind == "raises once" and attempt == 0):
        raise KeyError("mood")
    ENDED[:] = [client]
    texts = [answer.choices[0].message.content or "" for answer in answers]
    info = {
        "attempt": attempt,
        "late": late,
        "texts": texts,
        "tokens": [answer.usage.completion_tokens for answer in answers],
        "sampled": ["".join(each.token for each in answer.choices[0].logprobs.content) for answer in answers],
    }
    return {"reward": texts[-1].count("e") / 10, "rewards": {answers[0].id: -0.01}, "state": {"n": 2}, "info": info}


def find_kind(episode):
    """In each group of training, one episode is special."""
    _, lane, _, group, sample = episode.split("/")
    return ("raises", "raises once", "silent", "")[int(group) % 4] if (lane, sample) == ("train", "3") else ""


def call_late():
    try:
        ENDED[0].chat.completions.create(model="policy", messages=[{"role": "user", "content": "Late?"}])
    except APIStatusError as error:
        return error.status_code
    return 200
'''


def write_job(folder: Path) -> None:
    (folder / "agent.py").write_text(PROGRAM)
    job = yaml.safe_load((ROOT / "examples/tiny/rljob.yaml").read_text())
    spec = job["spec"]
    data = ROOT / "examples/quickstart/data"
    spec["model"]["source"] = str(TINY)
    spec["data"] = {
        "train": {"source": str(data / "train.jsonl"), "prompt": "question"},
        "eval": {"source": str(data / "eval.jsonl"), "prompt": "question", "limit": 4},
        "format": "chat",
    }
    spec.pop("rewards")
    spec["evaluation"] = {"everySteps": 2}
    spec["agent"] = {"type": "program", "runner": {"function": {"file": "agent.py"}, "slots": 4, "retries": 1}}
    # A random model seldom writes its end token: a letter ends most answers.
    spec["rollout"] |= {"maxModelLen": 1024, "sampling": {"maxTokens": 48, "stop": ["r"]}}
    spec["schedule"] = {"steps": 2, "promptsPerStep": 4}
    spec["trainer"]["replicas"] = 1
    (folder / "rljob.yaml").write_text(yaml.safe_dump(job))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose runner was killed after the first step."""
    folder = tmp_path_factory.mktemp("programs")
    write_job(folder)
    run = Run(folder, None)
    try:
        run.wait_for_step(1)
        run.kill("--serves episodes")
        run.finish()
    finally:
        run.close()
    return run.folder


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    rows = pq.read_table(folder / "trajectories" / name).to_pylist()
    return [row | {"info": json.loads(row["info"] or "{}")} for row in rows]


def read_train_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for step in (1, 2) for row in read_rows(folder, f"step-{step:06d}.train.parquet")]


@pytest.mark.slow
def test_every_prompt_trains_once_though_the_runner_is_killed(folder: Path) -> None:
    metrics = read_metrics(folder / FILE_METRICS)
    assert [step.step for step in metrics.steps] == [1, 2]
    for step in metrics.steps:
        assert step.invalid_by_reason == {"exception": 1, "no_turns": 1}
        assert step.agent.episodes_by_end == {"returned": 14, "failed": 2}
        assert step.agent.failures == {"runner": 2}
        assert step.num_masked == 2
        assert step.reward == pytest.approx(step.rewards["runner"] - 0.01), "less what the first answers cost"
        assert step.logprob_difference < 1e-4, "the trainer computes the log-probs of the same tokens"
    assert [found.num_invalid for found in metrics.evaluations] == [0, 0]
    assert len({index for step in read_metrics(folder / FILE_METRICS).prompts_trained for index in step}) == 8


@pytest.mark.slow
def test_trained_tokens_are_those_that_the_program_saw(folder: Path) -> None:
    rows = [row for row in read_train_rows(folder) if row["failure"] is None]
    assert any(row["advantage"] for row in rows)
    for row in rows:
        info = row["info"]
        assert [turn["text"] for turn in row["turns"]] == info["texts"]
        spans = [span for segment in row["segments"] for span in segment["spans"] if span["turn"] >= 0]
        assert [span["turn"] for span in spans] == [0, 1]
        assert [span["end"] - span["start"] for span in spans] == info["tokens"]
        assert [span["text"] for span in spans] == info["sampled"]
        assert sum(info["tokens"]) == row["num_sampled_tokens"]
        assert [turn["reward"] for turn in row["turns"]] == [-0.01, None]
        assert (row["own_reward"], row["score"]) == (info["texts"][-1].count("e") / 10,) * 2
        assert (json.loads(row["state"]), row["end"]) == ({"n": 2}, "returned")


@pytest.mark.slow
def test_special_episodes_are_retried_or_invalid_with_their_reason(folder: Path) -> None:
    rows = {(row["group"], row["sample"]): row for row in read_train_rows(folder)}
    for group in range(8):
        row = rows[group, 3]
        failure = row["failure"] or ""
        if group % 4 == 0:
            assert failure.startswith("spec.agent.runner: exception: ")
            assert "agent.py" in failure
            assert "mood" in failure
            assert len(row["turns"]) == 2, "the log has what the last attempt sampled"
        elif group % 4 == 1:
            assert (failure, len(row["turns"])) == ("", 2), "what the first attempt sampled is dropped"
            assert row["info"]["attempt"] >= 1
        elif group % 4 == 2:
            assert failure == "spec.agent.runner: no_turns: the program ended without an answer of the model"
        if failure:
            assert (row["score"], row["advantage"]) == (None, None)


@pytest.mark.slow
def test_key_of_an_ended_episode_is_refused(folder: Path) -> None:
    late = {row["info"].get("late") for row in read_train_rows(folder)}
    assert 410 in late
    assert late <= {410, None}
