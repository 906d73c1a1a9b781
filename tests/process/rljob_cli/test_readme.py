"""The README's commands for a new job, as they stand. The Hub is a local one. `rljob run` has an integration test."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.hub import run_hub
from tests.support.model_folder import write_model
from tests.support.readme import read_commands, read_smallest_job
from tests.support.waiting import DEADLINE_SECONDS

PROGRAMS = Path(sys.executable).parent


@pytest.fixture
def shell(tmp_path):
    """Run a command of the README in an empty folder, and return what it prints."""
    with run_hub(tmp_path / "hub") as hub:
        for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"):
            write_model(hub.add(f"models/{name}"), {"max_position_embeddings": 2048})
        rows = hub.add("datasets/openai/gsm8k") / "main" / "train.jsonl"
        rows.parent.mkdir()
        rows.write_text('{"question": "1 + 1?", "answer": "1 + 1 = 2\\n#### 2"}\n')
        (rows.parents[1] / "README.md").write_text("---\nconfigs: [{config_name: main, data_files: main/*}]\n---\n")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
        folder = tmp_path / "work"
        folder.mkdir()

        def run(program, *arguments):
            command = [PROGRAMS / program, *arguments]
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        run.folder = folder
        yield run


def read_commands_of(folder):
    """Return the README's commands for one job, without `rljob run`, and the file that it shows how to edit."""
    mine = [command for command in read_commands() if any(part.split("/")[0] == folder for part in command)]
    (edited,) = (command[1] for command in mine if command[0] == "$EDITOR")
    return [command for command in mine if command[0] == "rljob" and command[1] != "run"], edited


def test_commands_for_a_new_job_work_in_order(shell):
    commands, edited = read_commands_of("myjob")
    init, score, validate = (shell(*command) for command in commands)
    assert "myjob" in init
    assert (shell.folder / edited).is_file()
    assert "exact" in score
    assert "is valid" in validate


def test_commands_for_a_new_agent_work_in_order(shell):
    commands, edited = read_commands_of("myagent")
    init, play = commands
    assert "myagent" in shell(*init)
    assert (shell.folder / edited).is_file()
    # openai is installed: no package index is needed.
    found = shell(*play, "--set", "spec.agent.runner.function.requirements=[]")
    assert "2 turns, ended by returned | score 1" in found


@pytest.mark.parametrize("options", [[], ["--data", "my rows.jsonl"], ["--data", "my rows.jsonl", "--prompt", "id"]])
def test_next_command_of_init_works_as_it_is_printed(shell, options):
    """Pasted into a shell, from a folder whose name a shell would divide."""
    (shell.folder / "my rows.jsonl").write_text('{"id": "1 + 1?", "question": "1 + 1?", "answer": "2"}\n' * 20)
    printed = shell("rljob", "init", "my job", *options)
    following = next(line for line in printed.splitlines() if line.startswith("next: "))
    assert "reward correct" in shell(*shlex.split(following.removeprefix("next: ")))
    assert "is valid" in shell("rljob", "validate", "my job")


def test_smallest_job_is_valid_and_renders_on_a_machine_without_gpus(shell):
    (shell.folder / "rljob.yaml").write_text(read_smallest_job())
    assert "is valid" in shell("rljob", "validate", "--cluster", "rljob.yaml")
    kinds = [child["kind"] for child in yaml.safe_load_all(shell("rljob", "validate", "--render", "rljob.yaml"))]
    assert "StatefulSet" in kinds
