"""The server of a sandbox as a process, as in an image that has nothing else of RLJob."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_service.worker.code import agent_sandbox, sandbox_server
from rljob_service.worker.code.agent_sandbox import SandboxSettings
from tests.support.waiting import DEADLINE_SECONDS

TOKEN = "secret-of-the-pool"
USER = 65534 if os.geteuid() == 0 else None
"""Nor is the server in a sandbox root, who may read the memory of every process."""
PYTHON = "/usr/bin/python3" if USER and Path("/usr/bin/python3").exists() else sys.executable
"""One that this user may execute."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that another user reaches, other than those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[SandboxSettings, Path]]:
    """The copied program, started without any other module of RLJob. Its folder is the episode's."""
    copy = folder / "rljob/server.py"
    subprocess.run([sys.executable, "-m", sandbox_server.__name__, "--copy", str(copy)], check=True)
    (work := folder / "work").mkdir()
    work.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {"PATH": os.environ["PATH"], sandbox_server.ENV_TOKEN: TOKEN, sandbox_server.ENV_ADDRESS: "127.0.0.1"}
    # -S: without site-packages, where RLJob is.
    process = subprocess.Popen(
        [PYTHON, "-S", str(copy), str(port), str(work)], env=environment, user=USER, group=USER, cwd=work
    )
    try:
        wait_until_ready(port)
        yield SandboxSettings("pool", port, TOKEN, 60), work
    finally:
        process.kill()
        process.wait()


def wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1):
                return
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.02)


def run(server: tuple[SandboxSettings, Path], code: str, language: str = "shell", **more: Any) -> str:
    request = {"language": language, "code": code, "seconds": 20, "max_characters": 1000} | more
    return agent_sandbox.send("127.0.0.1", server[0], request, 30)


def test_files_remain_from_call_to_call_and_processes_do_not(server):
    run(server, "echo 41 > kept; sleep 1000 & echo $! > pid")
    answer = run(server, "print(int(open('kept').read()) + 1)", "python")
    assert answer == "42"
    pid = (server[1] / "pid").read_text().strip()
    assert has_ended(pid)


def test_what_the_code_left_behind_is_reaped(server):
    pids = run(server, "for i in 1 2 3; do sleep 1000 & echo $!; done").split()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "the zombies remain"
        run(server, "true")


def has_ended(pid: str) -> bool:
    """A killed process may remain as a zombie: its new parent need not reap it."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("x = 6\nx * 7", "42"),
        ("print('a')\n[1, 2]", "a\n[1, 2]"),
        ("x = None\nx", "[no output]"),
        ("import sys\nsys.exit('stop')", "stop\n[exit code 1]"),
        ("'\0'", "[not run: the code has a null character]"),
    ],
)
def test_python_prints_the_value_of_its_last_line(server, code, output):
    assert run(server, code, "python") == output


def test_an_exception_has_the_lines_of_the_code_alone(server):
    answer = run(server, "def f():\n    return 1 / 0\nf()", "python").splitlines()
    frames = [line.strip() for line in answer if line.startswith("  File")]
    assert frames == ['File "<code>", line 3, in <module>', 'File "<code>", line 2, in f']
    assert answer[-2:] == ["ZeroDivisionError: division by zero", "[exit code 1]"]


def test_code_that_runs_too_long_is_killed_with_its_children(server):
    answer = run(server, "echo started; sleep 1000 | cat", seconds=0.5)
    assert answer == "started\n[timed out after 0.5 s]"


def test_a_process_that_keeps_the_output_open_does_not_hold_the_call(server):
    answer = run(server, "setsid sleep 20 & echo done")
    assert answer == "done"


def test_a_flood_is_cut_off_and_does_not_block_the_code(server):
    answer = run(server, "print('a' + 'x' * 10_000_000 + 'z')", "python", max_characters=21)
    assert answer == "axxxxxx\n[...]\nxxxxxxz"


def test_the_code_cannot_read_the_token_of_the_server(server):
    answer = run(server, "cat /proc/$PPID/environ /proc/$PPID/mem; env")
    assert "ermission denied" in answer
    assert TOKEN not in answer


def test_the_environment_of_the_code_has_no_token(server):
    assert TOKEN not in run(server, "env")


def test_only_requests_with_the_token_run(server):
    settings = server[0]._replace(token="guessed")
    with pytest.raises(Exception, match="401: wrong token"):
        agent_sandbox.send("127.0.0.1", settings, {"language": "shell", "code": "touch hacked"}, 30)
    assert not (server[1] / "hacked").exists()


@pytest.mark.parametrize(("size", "status"), [("-1", 413), ("many", 400), (str(1 << 40), 413)])
def test_a_size_that_cannot_be_is_refused(server, size, status):
    connection = http.client.HTTPConnection("127.0.0.1", server[0].port, timeout=DEADLINE_SECONDS)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/run", headers={"Authorization": f"Bearer {TOKEN}", "Content-Length": size})
        assert connection.getresponse().status == status


def test_a_body_that_is_not_a_request_is_refused(server):
    with pytest.raises(Exception, match="400: not a request"):
        agent_sandbox.send("127.0.0.1", server[0], {"code": "x"}, 30)
    assert run(server, "true") == "[no output]", "the server still answers"
