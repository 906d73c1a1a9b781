"""Workers with dedicated users, and a server without privileges as in a Pod.

Both need an interpreter and packages that every user can read, so the server runs from a copy with the system's Python.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.reward_process import TOKEN, Server
from tests.support.waiting import wait_for

PYTHON = "/usr/bin/python3"
NOBODY = 65534
ARBITRARY_USER = 123456
PACKAGES = (
    *(
        "rljob_api",
        "rljob_service",
        "rljob_plugins",
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_inspection",
        "yaml",
    ),
    *("idna", "httptools", "uvloop", "prometheus_client", "aiohttp"),
    *("multidict", "yarl", "frozenlist", "aiosignal", "attr", "attrs", "aiohappyeyeballs", "propcache", "jinja2"),
    *("markupsafe", "jsonschema", "psutil", "cachetools"),
)
SOURCE = r"""
import multiprocessing, os, signal, socket, subprocess

def refused(call, *arguments):
    try:
        call(*arguments)
    except (PermissionError, ValueError):
        return True
    return False

def touch(pids):
    others = {int(pid) for pid in pids.split()} - {os.getpid()}
    return float(all(refused(os.kill, pid, signal.SIGKILL) for pid in others))

def read(server):
    return float(refused(open, f"/proc/{server}/environ", "rb") and refused(open, f"/proc/{server}/mem", "rb"))

def fork_bomb(_):
    while True:
        os.fork()

def daemon(_):
    command = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
    return float(subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout)

def manager(_):
    with multiprocessing.Manager() as manager:
        return float(len(manager.list([1, 2])))

def share(_):
    open("/dev/shm/left", "xb").close()
    return 1.0

def share_tmp(_):
    open("/tmp/left", "xb").close()
    os.makedirs("/tmp/folder/deep")
    return 1.0

def fill_tmp(_):
    for number in range(1 << 20):
        with open(f"/tmp/{number}", "wb") as file:
            file.write(bytes(1 << 20))

def files(_):
    folder = os.environ["TMPDIR"]
    left = os.listdir(folder)
    os.makedirs(f"{folder}/a/b")
    os.chmod(f"{folder}/a", 0)
    return float(left == [])

def compute_score(solution_str, ground_truth):
    if solution_str == "uid":
        return float(os.getuid())
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "write":
        return float(refused(open, ground_truth, "w"))
    return globals()[solution_str](ground_truth)
"""


def _same_python() -> bool:
    code = "import sys; print(sys.version_info[:2] == " + repr(tuple(sys.version_info[:2])) + ")"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() == "True"


pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists(PYTHON) or not _same_python(),
    reason="needs root, and a system Python of the same version",
)


@pytest.fixture(scope="module")
def packages() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for package in PACKAGES:
            try:
                found = importlib.import_module(package)
            except ImportError:
                continue
            shutil.copytree(Path(found.__file__).parent, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(importlib.import_module("typing_extensions").__file__, folder)
        plugins = importlib.metadata.distribution("rljob-plugins")
        entry_points = f"rljob_plugins-{plugins.version}.dist-info"
        shutil.copytree(str(plugins.locate_file(entry_points)), folder / entry_points)
        yield folder


@pytest.fixture(scope="module", params=[None, NOBODY], ids=["root", "unprivileged"])
def server(request: pytest.FixtureRequest, packages: Path) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        function = {"inline": SOURCE, "maxProcesses": 20}
        config = {"name": "test", "slots": 2, "timeoutSeconds": 30, "function": function}
        (folder / "service.yaml").write_text(yaml.safe_dump(config))
        environment = {"PYTHONPATH": str(packages), "HOME": "/tmp", "TMPDIR": "/var/tmp"}
        host = f"127.11.{os.getpid() % 250 + 1}.{1 if request.param else 2}"
        started = Server(folder, host, ["--grace", "10"], environment, PYTHON, request.param)
        started.user = request.param or 0
        try:
            wait_for(started.is_ready, "the server to be ready")
            yield started
        finally:
            started.stop()


def test_each_worker_has_a_dedicated_user_when_the_server_may_switch(server: Server) -> None:
    server.score("uid")
    if server.user == 0:
        users = wait_for(lambda: _dedicated_users(server), "two workers with dedicated users")
        assert server.score("uid")["score"] in users
    else:
        assert {child.uids().real for child in server.children()} == {NOBODY}
        assert "uid: the server lacks CAP_" in server.log.read_text()


def _dedicated_users(server: Server) -> set[int]:
    """A worker starts as root, and switches before it runs any user code."""
    users = {child.uids().real for child in server.children()}
    return users if len(users) == 2 and min(users) >= 20_000 else set()


@pytest.mark.parametrize("behaviour", ["read", "files"])
def test_worker_cannot_read_the_server_and_works_in_its_directory(server: Server, behaviour: str) -> None:
    for _ in range(3):
        result = server.score(behaviour, ground_truth=str(server.pid))
        assert result["score"] == 1.0, result["message"]


def test_shared_memory_is_private_with_and_without_privileges(server: Server) -> None:
    assert "private-shm" not in server.log.read_text()
    for _ in range(3):
        result = server.score("share")
        assert result["score"] == 1.0, result["message"]
    assert not os.path.exists("/dev/shm/left")


def test_worker_cannot_kill_the_server_or_another_worker(server: Server) -> None:
    pids = " ".join(str(pid) for pid in (server.pid, *(child.pid for child in server.children())))
    result = server.score("touch", ground_truth=pids)
    assert result["score"] == 1.0, result["message"]
    assert server.is_ready()


def test_worker_cannot_write_to_a_file_that_its_user_may_write(server: Server) -> None:
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        os.chmod(file.name, 0o666)
        assert server.score("write", ground_truth=file.name)["score"] == 1.0


def test_fork_bomb_costs_one_result(server: Server) -> None:
    result = server.score("fork_bomb")
    assert result["reason"] == "worker_died"
    assert "more than 20 processes and threads (maxProcesses)" in result["message"]
    assert server.score("read", ground_truth=str(server.pid))["score"] == 1.0


def test_daemon_of_another_user_ends_with_its_sample(server: Server) -> None:
    result = server.score("daemon")
    assert result["valid"], result["message"]
    wait_for(lambda: not psutil.pid_exists(int(result["score"])), "the daemon to end")


def test_multiprocessing_connects_to_its_own_socket(server: Server) -> None:
    result = server.score("manager")
    assert result["score"] == 2.0, result["message"]


def test_token_is_not_in_the_environment_of_workers(server: Server) -> None:
    wait_for(lambda: _check_workers(server), "a worker to check")


def _check_workers(server: Server) -> int:
    num_checked = 0
    for child in server.children():
        with contextlib.suppress(psutil.Error):  # an earlier test killed it
            # Between fork and exec it still shows the server's command and environment.
            if "rljob_service.worker" in child.cmdline():
                assert TOKEN not in child.environ().values()
                num_checked += 1
    return num_checked


def test_server_runs_as_a_user_without_a_name_in_group_0(packages: Path) -> None:
    """As OpenShift starts Pods."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        config = {"name": "test", "slots": 1, "function": {"inline": SOURCE, "spareWorkers": 0}}
        (folder / "service.yaml").write_text(yaml.safe_dump(config))
        environment = {"PYTHONPATH": str(packages), "HOME": "/tmp", "USER": "rljob", "TMPDIR": "/var/tmp"}
        host = f"127.11.{os.getpid() % 250 + 1}.4"
        started = Server(folder, host, [], environment, PYTHON, ARBITRARY_USER, group=0)
        try:
            wait_for(started.is_ready, "the server to be ready")
            assert started.score("uid")["score"] == ARBITRARY_USER
            assert started.score("files")["score"] == 1.0
        finally:
            started.stop()


@pytest.fixture
def container(packages: Path) -> Iterator[Callable[..., Server]]:
    """Start a server as process 1 with a /dev/shm and a /tmp to itself, as in a Pod, and without private ones for each
    worker."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        program = folder / "container"
        inner = f'mount -t tmpfs shm /dev/shm && mount -t tmpfs tmp /tmp && cd / && exec {PYTHON} "$@"'
        program.write_text(f"#!/bin/sh\nexec unshare -m -p -f --mount-proc --kill-child sh -c '{inner}' sh \"$@\"\n")
        program.chmod(0o755)
        config = {"name": "test", "slots": 1, "function": {"inline": SOURCE, "spareWorkers": 0, "maxFileSize": "8Mi"}}
        (folder / "service.yaml").write_text(yaml.safe_dump(config))
        disabled = "private-shm,private-tmp,uid"
        environment = {"PYTHONPATH": str(packages), "RLJOB_REWARD_DISABLE_ISOLATION": disabled, "TMPDIR": "/var/tmp"}
        servers = []

        def start(**more: str) -> Server:
            address = f"127.11.{os.getpid() % 250 + 1}.3"
            servers.append(Server(folder, address, [], environment | more, str(program)))
            wait_for(servers[0].is_ready, "the server to be ready")
            return servers[0]

        yield start
        for started in servers:
            started.process.kill()  # unshare ends its process 1
            started.process.wait()


@pytest.mark.parametrize("behaviour", ["share", "share_tmp"])
def test_files_in_what_a_containers_workers_share_end_with_their_sample(
    container: Callable[..., Server], behaviour: str
) -> None:
    started = container()
    for _ in range(6):
        result = started.score(behaviour)
        assert result["score"] == 1.0, result["message"]


def test_files_in_a_containers_tmp_count_against_the_limit(container: Callable[..., Server]) -> None:
    result = container().score("fill_tmp")
    assert result["reason"] == "worker_died", result["message"]
    assert "maxFileSize" in result["message"]


def test_tmp_is_not_shared_where_the_server_has_its_own_files(container: Callable[..., Server]) -> None:
    started = container(HOME="/tmp")
    assert "PermissionError" in started.score("share_tmp")["message"]
    assert "private-tmp: turned off: /tmp cannot be written" in started.log.read_text()
