"""The command as a user starts it: signals, exit codes, and that it leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rljob_cli import main
from rljob_cli.local.node.podshim import descendants
from tests.support.model_folder import write_model
from tests.support.waiting import DEADLINE_SECONDS

# The head starts a grandchild in a new session; the other roles only sleep. Templates replace the real programs.
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
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, output


def until(condition, what):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.05)
    return found


def template(role, script):
    return f"template: {{spec: {{containers: [{{name: {role}, command: [python, -c, {script!r}]}}]}}}}"


@pytest.fixture
def job(tmp_path):
    """A job whose roles only sleep."""
    write_model(tmp_path / "model", {"max_position_embeddings": 2048})
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
  model: {{source: ./model}}
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
    """A run whose Pods are up, and the pids of its descendants."""
    process = rljob("run", job, "--no-call", "--dir", job.parent / "runs", start_new_session=True)
    up = job.parent / "runs" / "sleepy" / "up"
    until(lambda: up.exists() or process.poll() is not None, "the head runs")
    assert process.poll() is None, process.communicate()[0]
    until(lambda: len(descendants([process.pid])) >= 9, "four shims, four containers, one grandchild")
    return process, descendants([process.pid])


def assert_dead(pids):
    until(lambda: not set(descendants([0])) & set(pids), "all processes are dead")


def test_sigkill_leaves_no_process(job):
    process, pids = start(job)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert_dead(pids)


def test_ctrl_c_ends_every_process_and_prints_how_to_resume(job):
    process, pids = start(job)
    code, output = finish(rljob("run", job, "--no-call", "--dir", job.parent / "runs"))
    assert code == 2
    assert f"pid {process.pid}" in output, "a second run of the same folder names the first"
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert f"to resume: rljob run {job} --dir {job.parent / 'runs'}\n" in output
    assert output.strip().splitlines()[-1] == str(job.parent / "runs" / "sleepy" / "summary.json")
    assert_dead(pids)


def test_run_fails_and_ends_all_roles_when_the_head_exits_with_a_user_error(job):
    text = job.read_text()
    job.write_text(text.replace("time.sleep(300)\n  trainer", "sys.exit(78)\n  trainer"))
    code, output = finish(rljob("run", job, "--no-call", "--dir", job.parent / "runs", "--output", "plain"))
    assert code == 1, output
    assert "exit code 78" in output
    assert Path(output.strip().splitlines()[-1]).is_file(), "the last line is the path of summary.json"


def test_run_fails_when_the_head_exceeds_its_backoff_limit(job):
    text = job.read_text().replace("time.sleep(300)\n  trainer", "sys.exit(75)\n  trainer")
    job.write_text(text.replace("  head:\n", "  head:\n    backoffLimit: 1\n"))
    code, output = finish(rljob("run", job, "--no-call", "--dir", job.parent / "runs", "--output", "plain"))
    assert code == 1, output
    assert "the head failed 2 times within 21600 s, and spec.head.backoffLimit is 1; last: exit code 75" in output


def test_importing_the_command_imports_no_heavy_package():
    heavy = "{'aiohttp', 'kubernetes', 'pydantic', 'pyarrow', 'rich.table', 'yaml', 'torch'}"
    code = f"import sys, rljob_cli.main; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    ["report x", "trajectories x", "export x --to y", "logs x", "suspend x", "resume x"],
)
def test_a_run_that_does_not_exist_is_said_before_what_shows_one_is_imported(tmp_path, arguments):
    """Else the answer to a misspelt name takes a second."""
    shown = "{'rljob_api.manifest.job', 'rljob_cli.cluster', 'rljob_cli.run', 'pyarrow', 'rich.table', 'kubernetes'}"
    code = f"import sys; from rljob_cli.main import main; sys.argv[1:] = {arguments.split()!r}\n"
    code += f"try: main()\nfinally: print(sorted({shown} & set(sys.modules)))"
    environment = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"} | {"HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
    assert "run not found" in done.stderr or "no run at x" in done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["-h"], ["validate", "none.yaml", "-o", "json"]])
def test_reader_that_has_left_the_pipe_ends_the_command_silently(tmp_path, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rljob_cli.main", *arguments]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, cwd=tmp_path, env=buffered, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_usage_names_the_command_that_was_typed(tmp_path):
    plugin = tmp_path / "kubectl-rljob"
    plugin.symlink_to(Path(main.__file__))
    for program, name in ((plugin, "kubectl rljob"), (Path(main.__file__), "main.py")):
        done = subprocess.run([sys.executable, program, "top", "-h"], capture_output=True, text=True)
        assert done.stdout.startswith(f"Usage: {name} top [OPTIONS]")


@pytest.mark.parametrize(("command", "rc"), [("init --list-tasks >&-", 0), ("plan nothere.yaml 2>&-", 2)])
def test_what_is_printed_to_a_closed_stream_is_dropped(command, rc):
    """`print` takes the missing stderr for stdout, whose readers expect JSON."""
    line = f"{sys.executable} -m rljob_cli.main {command}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (rc, "", "")


def test_no_colour_in_a_pipe_or_with_no_color(job):
    for extra in ({}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}):
        run = rljob("run", job, "--no-call", "--set", "spec.model.source=none", env=os.environ | extra)
        assert "\x1b[" not in finish(run)[1]


def test_control_characters_of_a_name_reach_no_stream(tmp_path):
    code, output = finish(rljob("validate", "\x1b]0;owned\x07\x9b2J.yaml", cwd=tmp_path))
    assert (code, output) == (2, "]0;owned2J.yaml: not found; pass the path of a job's YAML file\n")


def test_file_name_that_the_terminal_cannot_encode_is_escaped(tmp_path):
    code, output = finish(rljob("validate", "日.yaml", cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": "ascii"}))
    assert (code, output.count("\n")) == (2, 1)
    assert "\\u65e5.yaml: not found" in output
