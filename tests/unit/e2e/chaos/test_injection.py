"""Which fault of the machine each kind of the plan is. The machine itself is only recorded."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from chaos import injection, machine
from chaos.injection import is_replaced, lasting, open_fault, strike
from chaos.plan import LONG, QUICK, Fault
from harness import CommandError


class Machine:
    """Records commands and signals, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[Any] = []
        self.pids = [[11, 12]]
        """What each search finds."""
        monkeypatch.setattr(machine, "execute", lambda *words, **_: self.done.append(" ".join(map(str, words))))
        monkeypatch.setattr(machine, "python", lambda *words: self.done.append(" ".join(words[2:])))
        monkeypatch.setattr(machine, "send", lambda pids, number: self.done.append((tuple(pids), number)))
        monkeypatch.setattr(machine, "find_processes", self.find)
        process = SimpleNamespace(pid=7, info={"name": "kube-apiserver"})
        monkeypatch.setattr(psutil, "process_iter", lambda names: [process])
        kubectl = lambda *words: self.done.append(" ".join(words))  # noqa: E731
        self.job = SimpleNamespace(
            name="chaos", cluster=SimpleNamespace(kubectl=kubectl), wait_for=lambda _, found: found()
        )

    def find(self, *_: Any) -> list[int]:
        found = self.pids.pop(0) if len(self.pids) > 1 else self.pids[0]
        if not found:
            raise CommandError("kubectl: no answer")
        return found

    def apply(self, fault: Fault, folder: Path) -> list[Any]:
        """Return what happened until the fault was there, then what ended it."""
        observer: Any = SimpleNamespace(job=self.job, folder=folder)
        with open_fault(fault, observer):
            during, self.done = self.done, []
        return [*during, "|", *self.done]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault("slow", "rank", 20), [((11,), signal.SIGSTOP), "|", ((11,), signal.SIGCONT)]),
        (Fault("cut", "trainer-reward", 600), ["nft -f -", "|", "nft delete table ip rljob_chaos"]),
        (Fault("freeze-api-server", "", 60), [((7,), signal.SIGSTOP), "|", ((7,), signal.SIGCONT)]),
        (
            Fault("power-off", "reward", 60),
            [
                *("power-off reward", "|", "power-on reward"),
                "wait node/rljob-reward --for=condition=Ready --timeout=120s",
            ],
        ),
    ],
)
def test_fault_that_lasts_begins_and_ends(here: Machine, tmp_path: Path, fault: Fault, expected: list[Any]) -> None:
    assert here.apply(fault, tmp_path) == expected


def test_full_disk_has_room_again(here: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        """A file on a disk that has room for two blocks."""

        num_blocks = 0

        def write(self, block: bytes) -> None:
            self.num_blocks += 1
            if self.num_blocks > 2:
                raise OSError("no space left")

        def flush(self) -> None: ...

    @contextmanager
    def opened(path: Path, mode: str) -> Iterator[Disk]:
        path.touch()
        yield Disk()

    monkeypatch.setattr(Path, "open", opened)
    with open_fault(Fault("fill-disk", ""), SimpleNamespace(job=here.job, folder=tmp_path)):  # type: ignore[arg-type]
        assert (tmp_path / "filler").exists()
    assert not (tmp_path / "filler").exists()


def test_every_kind_of_the_plan_is_known() -> None:
    """The last case of open_fault is the API server's: nothing else may get there."""
    opened = {"slow", "cut", "fill-disk", "power-off", "freeze-api-server"}
    struck = {"kill", "freeze", "drain", "flip-bit"}
    assert {fault.action for fault in (*QUICK, *LONG)} == opened | struck
    assert all(fault.seconds > 0 for fault in (*QUICK, *LONG) if fault.action in opened)


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("freeze", signal.SIGSTOP)])
def test_one_process_is_struck_and_is_over_once_another_has_come(here: Machine, action: Any, number: int) -> None:
    here.pids = [[11, 12], [11, 12], [12], [], [12, 19]]
    has_successor = strike(Fault(action, "reward worker"), here.job.cluster, here.job)  # type: ignore[arg-type]
    assert here.done == [((11,), number)]
    assert [has_successor() for _ in range(4)] == [False, False, False, True], "a failed look is no answer"


def test_a_process_that_stays_is_not_replaced() -> None:
    assert not is_replaced([11], [11, 12]), "the pool only grew"
    assert not is_replaced([11], [])
    assert is_replaced([11], [12])


def test_what_lasts_ends_while_the_caller_observes() -> None:
    order: list[str] = []
    is_over = threading.Event()

    @contextmanager
    def fault() -> Iterator[None]:
        order.append("begins")
        yield
        order.append("ends")
        is_over.set()

    with lasting(fault(), 0.0):
        assert is_over.wait(10)
        order.append("observed")
    assert order == ["begins", "ends", "observed"]


def test_drain_and_flipped_bit_are_applied(here: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injection, "log_step", lambda text: None)
    step = tmp_path / "checkpoints/step-000003"
    step.mkdir(parents=True)
    (step / "COMPLETE").write_text("{}")
    (step / "weights").write_bytes(bytes(100))
    observer: Any = SimpleNamespace(job=here.job, folder=tmp_path)
    with injection.apply_fault(Fault("flip-bit", ""), observer):
        assert sum((step / "weights").read_bytes()) == 1
    assert here.done == [((11,), signal.SIGKILL)], "the head resumes from it"
    here.done.clear()
    with injection.apply_fault(Fault("drain", "trainer"), observer) as has_successor:
        assert has_successor()
    assert [each.split()[0] for each in here.done] == ["drain", "uncordon"]
