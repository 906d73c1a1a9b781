"""What counts as whole again after a fault."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chaos.observer import Observer


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
