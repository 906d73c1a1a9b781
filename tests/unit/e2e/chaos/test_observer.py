"""What counts as whole again after a fault."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest
from chaos import observer as observer_module
from chaos.observer import Observer
from chaos.plan import Fault, Injection
from harness import CommandError


def pod(name: str, phase: str, *, is_ready: bool) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(is_ready)}]
    return {"metadata": {"name": name, "uid": name}, "status": {"phase": phase, "conditions": conditions}}


@pytest.mark.parametrize(
    ("old", "is_whole"),
    [(pod("head-a", "Failed", is_ready=False), True), (pod("head-a", "Running", is_ready=False), False)],
)
def test_a_pod_that_has_ended_is_not_waited_for(old: dict[str, Any], is_whole: bool) -> None:
    pods = [old, pod("head-b", "Running", is_ready=True)]
    cluster = SimpleNamespace(get=lambda kind, *_: {"items": pods} if kind == "pods" else {"status": {}})
    observer = Observer(SimpleNamespace(name="job", cluster=cluster), Path(), limit_seconds=1)  # type: ignore[arg-type]
    assert observer.is_whole(observer.look()) == is_whole


def test_what_a_fault_changes_is_compared_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [CommandError("kubectl: timeout"), {"items": []}, {"status": {}}]

    def get(*_: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, CommandError):
            raise answer
        return answer

    monkeypatch.setattr(harness.time, "sleep", lambda seconds: None)
    job = SimpleNamespace(name="job", cluster=SimpleNamespace(get=get))
    before = Observer(job, Path(), limit_seconds=1).look_until_answered()  # type: ignore[arg-type]
    assert (before["hung"], before["readiness"]) == (False, [])


QUIET = {"hung": False, "outage": False, "restarts": 0, "containers": [], "readiness": [("a", True)]}


class Script(Observer):
    """Shows one state after another, and a step with each. A poll takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *states: dict[str, Any]) -> None:
        super().__init__(SimpleNamespace(name="job"), Path(), limit_seconds=60)  # type: ignore[arg-type]
        self.states, self.now = [QUIET | state for state in states], 0.0
        monkeypatch.setattr(observer_module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(observer_module.time, "sleep", lambda seconds: None)

    def step(self) -> int:
        return 5 + int(self.now)

    def look(self) -> dict[str, Any]:
        self.now += 1
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


def follow(script: Script, fault: Fault, has_successor: Any = lambda: True) -> Any:
    return script.follow(Injection(fault, 0.0), QUIET, 4, has_successor)


def test_a_frozen_process_is_over_only_with_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, {})
    outcome = follow(script, Fault("freeze", "operator"), lambda: script.now >= 9)
    assert (outcome.detected_seconds, outcome.recovered_seconds, outcome.found) == (8, 8, "a new process")
    outcome = follow(Script(monkeypatch, {}), Fault("freeze", "reward worker"), lambda: False)
    assert (outcome.detected_seconds, outcome.recovered_seconds) == (None, None), "the deadline has passed"


def test_what_is_waited_out_is_an_alarm_if_it_is_replaced_or_called_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault("slow", "rank", seconds=3, is_waited_out=True)
    unready = {"readiness": [("a", False)]}
    outcome = follow(Script(monkeypatch, unready, unready, {}), fault)
    assert (outcome.alarm, outcome.is_good, outcome.found) == ("", True, "readiness")
    assert outcome.recovered_seconds > 3, "not before it has ended"
    outcome = follow(Script(monkeypatch, {"hung": True}, {"restarts": 1}), fault)
    assert (outcome.alarm, outcome.is_good) == ("hung, restarts", False)
