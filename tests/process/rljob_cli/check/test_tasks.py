"""Every task of `rljob init` is valid as it stands, with one call of each reward. The Hub is a local one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rljob_cli.check.device_fields import DEFAULT_MODEL, LARGER_MODELS
from rljob_cli.check.scaffold import TASKS
from rljob_cli.main import app
from tests.support.hub import run_hub
from tests.support.model_folder import write_model

_CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train.jsonl}, {split: test, path: main/test.jsonl}]
---
"""


@pytest.fixture
def environment(tmp_path):
    """The environment of a shell whose Hub has the default model and GSM8K."""
    with run_hub(tmp_path / "hub") as hub:
        for model in (DEFAULT_MODEL, *LARGER_MODELS):
            write_model(hub.add(f"models/{model.removeprefix('hf://')}"), {"max_position_embeddings": 2048})
        dataset = hub.add("datasets/openai/gsm8k")
        (dataset / "README.md").write_text(_CARD)
        (dataset / "main").mkdir()
        for split, number in (("train", 1), ("test", 2)):
            row = {"question": f"{number} + 0?", "answer": f"{number} + 0 = {number}\n#### {number}"}
            (dataset / "main" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
        shell = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        shell |= {"CUDA_VISIBLE_DEVICES": ""}
        yield shell | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}


def write_jobs(*options, folder=""):
    """Write the job of each task; return their paths."""
    for task in TASKS:
        rows = ["--data", "rows.jsonl"] if task == "own" else ["--task", task]
        assert CliRunner().invoke(app, ["init", f"{folder}{task}", *rows, *options]).exit_code == 0
    return [f"{folder}{task}/rljob.yaml" for task in TASKS]


def validate(environment, *arguments):
    command = [sys.executable, "-m", "rljob_cli.main", "validate", *arguments, "-o", "json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["files"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with rows of the user's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "2"}\n')


def test_job_of_each_task_is_valid_as_it_stands(environment, folder):
    found = dict(zip(TASKS, validate(environment, *write_jobs("--gpus", "0")), strict=True))
    assert [file["warnings"] + file["local_problems"] for file in found.values()] == [[]] * len(TASKS)
    # The server of a judge starts without its model, so that its templates are checked.
    called = {task: [(reward["name"], reward["error"]) for reward in file["rewards"]] for task, file in found.items()}
    rewarded = {name for name, task in TASKS.items() if task.reward}  # the agents of the others reward
    names = {task: ["helpful" if task == "chat" else "correct"] if task in rewarded else [] for task in TASKS}
    names["judge"].append("polite")
    assert called == {task: [(name, "") for name in names[task]] for task in TASKS}


def test_job_of_each_task_for_gpus_is_valid_and_lacks_them_alone_here(environment, folder):
    paths = [path for number in "12" for path in write_jobs("--gpus", number, folder=f"{number}-")]
    found = validate(environment | {"OPENAI_API_KEY": "k"}, "--no-call", *paths)
    assert [file["warnings"] for file in found] == [[]] * len(paths)
    lacking = [problem["message"] for file in found for problem in file["local_problems"]]
    assert len(lacking) == len(paths)
    assert all(re.match(r"the job requests [12] GPUs, this machine has 0", message) for message in lacking)
