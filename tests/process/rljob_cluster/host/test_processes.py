"""A group of real child processes."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rljob_cluster.host import processes
from rljob_cluster.host.processes import ProcessGroup
from tests.support.waiting import DEADLINE_SECONDS


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ProcessGroup]:
    group = ProcessGroup(tmp_path / "logs")
    yield group
    group.stop_all()


def wait_for_log(group: ProcessGroup, name: str, text: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while text not in group.last_lines(name):
        assert time.monotonic() < deadline, group.last_lines(name)
        time.sleep(0.01)


def test_dead_process_is_restarted_with_its_command(group: ProcessGroup, capsys: pytest.CaptureFixture[str]) -> None:
    group.start("part", ["sh", "-c", "echo started as $$; sleep 100"])
    (first,) = group.pids
    wait_for_log(group, "part", f"started as {first}")
    group.restart_dead()
    assert group.pids == [first], "it runs"
    psutil.Process(first).kill()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while group.is_running("part"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    group.restart_dead()
    (second,) = group.pids
    wait_for_log(group, "part", f"started as {second}")
    assert "part exited with -9: restarting it" in capsys.readouterr().out


def test_stop_kills_a_process_that_ignores_sigterm(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_STOP_TIMEOUT_SECONDS", 0.1)
    group.start("stubborn", ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"])
    wait_for_log(group, "stubborn", "ready")
    (pid,) = group.pids
    group.stop("stubborn")
    assert not psutil.pid_exists(pid)
    assert not group.is_running("stubborn")
    group.stop("stubborn")  # no effect


def test_processes_stop_in_reverse_order(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("etcd", "kube-apiserver"):
        group.start(name, ["sleep", "100"])
    stopped: list[str] = []
    stop = group.stop
    monkeypatch.setattr(group, "stop", lambda name: (stopped.append(name), stop(name, signal.SIGKILL)))
    group.stop_all()
    assert stopped == ["kube-apiserver", "etcd"]
    assert group.pids == []
