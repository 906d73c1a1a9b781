"""The liveness probe of a vLLM sidecar fails for a server that is stopped, and for no other."""

import socket
import subprocess
import sys

import pytest

from rljob_core.children.vllm_sidecar import _IS_ALIVE


def probe(path, seconds="20"):
    return subprocess.run([sys.executable, "-c", _IS_ALIVE, str(path), seconds], check=False).returncode


@pytest.fixture
def server(tmp_path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        yield listening


def test_server_that_has_not_started_is_alive(tmp_path, server):
    assert probe(tmp_path / "missing") == 0
    assert probe(tmp_path / "socket") == 0, "it is bound and does not listen"


def test_server_that_accepts_and_does_not_answer_is_not_alive(tmp_path, server):
    server.listen()
    assert probe(tmp_path / "socket", "0.1") == 1


def test_server_that_answers_is_alive(tmp_path, server):
    server.listen()
    command = [sys.executable, "-c", _IS_ALIVE, str(tmp_path / "socket"), "20"]
    with subprocess.Popen(command) as running:
        connection, _ = server.accept()
        with connection:
            assert connection.recv(100) == b"GET /health HTTP/1.0\r\n\r\n"
            connection.sendall(b"HTTP/1.0 503 x\r\n\r\n")
        assert running.wait(20) == 0, "vLLM itself ends when its engine has died"
