"""The pictures of `rljob top` in docs/cli.md are what it draws, at two widths of a terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from rljob_cli.cluster import top, top_tables
from rljob_cli.run.reward_rows import RewardRow
from tests.paths import ROOT

NOW = datetime(2026, 1, 2, tzinfo=UTC)
FULL = "0/3 nodes are available: 3 Insufficient cpu."
STATUS = {
    "phase": "Restarting",
    "conditions": [
        {
            "type": "Restarting",
            "status": "True",
            "reason": "Unschedulable",
            "message": f"waits for 1 of 2 rollout Pods: sums-rollout-7d9f-b: Unschedulable: {FULL}",
        }
    ],
    "rollouts": "1/2",
    "rewards": "0/1",
    "roles": [
        {"name": "head", "desired": 1, "ready": 1},
        {"name": "trainer", "desired": 1, "ready": 1},
        {"name": "rollout", "desired": 2, "ready": 1},
        {"name": "reward-correct", "desired": 1, "ready": 0, "restarts": 3},
    ],
    "progress": {
        "step": 412,
        "totalSteps": 1000,
        "lastStepTime": "2026-01-01T23:57:00Z",
        "reward": 0.734,
        "phase": "score",
        "schedule": {
            "type": "bounded",
            "staleness": 1,
            "groupsInFlight": 52,
            "groupsScored": 12,
            "groupsDue": 4,
            "prefixHits": 0.98,
            "busy": "rollouts 97%, rewards 80%, trainer 31%",
        },
    },
}
JOB = {
    "metadata": {"namespace": "research", "name": "sums", "creationTimestamp": "2026-01-01T23:34:00Z"},
    "spec": {},
    "status": STATUS,
}
LATENCIES = RewardRow("correct", "function", 0, 1, 12, 0, None, None, None, 0.8, 4.1, {"timeout": 3, "exception": 2})


def pod(name: str, role: str, node: str | None, **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"rljob.dev/role": role}, "creationTimestamp": "2026-01-01T23:34:00Z"}
    return {"metadata": metadata, "spec": {"nodeName": node} if node else {}, "status": status}


def ready(name: str, role: str, node: str) -> dict[str, Any]:
    return pod(name, role, node, phase="Running", conditions=[{"type": "Ready", "status": "True"}])


PODS = [
    ready("sums-head-x", "head", "cpu-1"),
    ready("sums-trainer-0", "trainer", "gpu-1"),
    ready("sums-rollout-7d9f-a", "rollout", "gpu-2"),
    pod(
        "sums-rollout-7d9f-b",
        "rollout",
        None,
        phase="Pending",
        conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": FULL}],
    ),
    pod(
        "sums-reward-correct-5c-c",
        "reward-correct",
        "cpu-2",
        phase="Running",
        containerStatuses=[
            {
                "name": "reward",
                "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 1, "message": "reward.py, line 3: no module named sympy"}},
            }
        ],
    ),
]


@pytest.mark.parametrize("width", [80, 120])
def test_picture_is_what_top_draws(golden: Any, width: int) -> None:
    view = top.view_job(JOB, PODS, [], NOW, [LATENCIES])
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True, color_system="truecolor")
    console.print(top_tables.draw_job(view))
    assert "412/1000" in console.export_text(clear=False), "no digit is cut"
    title = f"kubectl rljob top sums, {width} columns"
    golden(ROOT / f"docs/images/top-{width}.svg", console.export_svg(title=title, unique_id=f"top{width}"))


@pytest.mark.parametrize("width", [80, 120])
def test_name_of_a_job_is_whole_so_that_it_can_be_copied(width: int) -> None:
    row = replace(top.view_job(JOB, PODS, [], NOW, [LATENCIES]).job, name="math-dapo-32b-lr1e6-entropy-seed3")
    console = Console(file=io.StringIO(), width=width)
    console.print(top_tables.draw_jobs([row], "research", everywhere=False))
    assert "math-dapo-32b-lr1e6-entropy-seed3 " in console.file.getvalue()
