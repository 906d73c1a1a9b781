"""The command itself, as a user starts it: exit codes, messages, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rljob_cli.local.node.podshim import descendants

_DEADLINE_SECONDS = 30.0
# A head that leaves a grandchild in a session of its own, and no other role's own programs: templates replace them.
_SLEEP = "import time; time.sleep(300)"
_FORKS = (
    "import os, subprocess, sys, time, pathlib; "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True); "
    "pathlib.Path(os.environ['RLJOB_RUN_DIR'], 'up').touch(); time.sleep(300)"
)


def rljob(*arguments, **options):
    command = [sys.executable, "-m", "rljob_cli.main", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def finish(process):
    output, _ = process.communicate(timeout=_DEADLINE_SECONDS)
    return process.returncode, output


def until(condition, what):
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.05)
    return found


def template(role, script):
    return f"template: {{spec: {{containers: [{{name: {role}, command: [python, -c, {script!r}]}}]}}}}"


@pytest.fixture
def job(tmp_path):
    """A job whose roles only sleep. The model is on the hub, so nothing of it is looked at."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth): return 1.0\n")
    forks = _FORKS.replace("'", '\\"').replace('\\"', "'")
    path = tmp_path / "job.yaml"
    path.write_text(
        f"""\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {{name: sleepy}}
spec:
  model: {{source: hf://org/model}}
  data: {{train: {{source: train.jsonl}}}}
  rewards:
  - name: r
    function: {{file: reward.py}}
    {template("reward", _SLEEP)}
  head:
    template:
      spec:
        containers:
        - name: head
          command:
          - python
          - -c
          - |
            {forks}
  trainer:
    {template("trainer", _SLEEP)}
  rollout:
    {template("rollout", _SLEEP)}
"""
    )
    return path


def start(job):
    """A run whose Pods are up, and every process below it."""
    process = rljob("run", job, "--dir", job.parent / "runs", start_new_session=True)
    up = job.parent / "runs" / "sleepy" / "up"
    until(lambda: up.exists() or process.poll() is not None, "the head runs")
    assert process.poll() is None, process.communicate()[0]
    until(lambda: len(descendants([process.pid])) >= 9, "four shims, four containers, one grandchild")
    return process, descendants([process.pid])


def assert_gone(pids):
    until(lambda: not set(descendants([0])) & set(pids), "all are dead")


def test_kill_9_of_the_command_leaves_no_process(job):
    process, pids = start(job)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert_gone(pids)


def test_ctrl_c_ends_every_process_and_says_how_to_go_on(job):
    process, pids = start(job)
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert f"to go on: rljob run {job} --dir {job.parent / 'runs'} " in output
    assert output.strip().splitlines()[-1] == str(job.parent / "runs" / "sleepy" / "summary.json")
    assert_gone(pids)


def test_a_second_run_of_the_same_folder_says_who_runs_it(job):
    process, pids = start(job)
    code, output = finish(rljob("run", job, "--dir", job.parent / "runs"))
    process.kill()
    process.communicate()
    assert code == 2
    assert f"pid {process.pid}" in output
    assert_gone(pids)


def test_a_head_that_says_whose_fault_it_is_fails_the_run_and_ends_all_others(job):
    text = job.read_text()
    job.write_text(text.replace("time.sleep(300)\n  trainer", "sys.exit(78)\n  trainer"))
    code, output = finish(rljob("run", job, "--dir", job.parent / "runs", "--output", "plain"))
    assert code == 1, output
    assert "exit code 78" in output
    assert Path(output.strip().splitlines()[-1]).is_file(), "the last line is summary.json's path"


def test_bad_input_is_a_message_and_exit_code_2(job):
    job.write_text(job.read_text().replace("train.jsonl", "none.jsonl"))
    code, output = finish(rljob("run", job, "--dir", job.parent / "runs"))
    assert code == 2
    assert output.startswith(f"{job}:6: spec.data.train.source there is no file")
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["init", "taken"], "taken: File exists"),
        (["init", "n" * 300], "File name too long"),
        (["validate", "."], ".: is no file; name a job's YAML file"),
        (["run", "job.yaml", "--dir", "taken"], "taken: File exists"),
        (["test-reward", "job.yaml", "--file", "latin-1"], "latin-1: is not UTF-8 text"),
    ],
)
def test_a_path_that_cannot_be_used_is_one_line_and_exit_code_2(job, arguments, words):
    (job.parent / "taken").touch()
    (job.parent / "latin-1").write_bytes(b"\xff\n")
    code, output = finish(rljob(*arguments, cwd=job.parent))
    assert (code, output.count("\n")) == (2, 1)
    assert words in output


def test_what_init_writes_is_valid(tmp_path):
    assert finish(rljob("init", tmp_path / "My first job"))[0] == 0
    code, output = finish(rljob("validate", tmp_path / "My first job" / "rljob.yaml"))
    assert code == 0, output
    code, output = finish(rljob("init", tmp_path / "My first job"))
    assert code == 2
    assert "already" in output


def test_test_reward_scores_and_shows_what_was_printed(tmp_path):
    finish(rljob("init", tmp_path / "job"))
    folder = tmp_path / "job"
    reward = folder / "reward.py"
    reward.write_text(reward.read_text() + "\nprint('imported')\n")
    code, output = finish(rljob("test-reward", folder / "rljob.yaml", "--file", folder / "data" / "completions.jsonl"))
    assert code == 0, output
    assert "0.5" in output
    assert "imported" in output
    reward.write_text("def compute_score(data_source, solution_str, ground_truth): raise ValueError('no')\n")
    code, output = finish(rljob("test-reward", folder / "rljob.yaml", "--completion", "5", "--answer", "5"))
    assert code == 1
    assert "ValueError" in output


def test_help_does_not_import_what_is_heavy():
    heavy = "{'aiohttp', 'matplotlib', 'pydantic', 'yaml', 'torch'}"
    code = f"import sys, rljob_cli.main; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_name_that_the_terminal_cannot_show_is_no_traceback(tmp_path):
    code, output = finish(rljob("validate", "日.yaml", cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": "ascii"}))
    assert (code, output.count("\n")) == (2, 1)
    assert "\\u65e5.yaml: there is no such file" in output
