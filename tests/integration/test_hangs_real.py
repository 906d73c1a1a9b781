"""`rljob run` on real vLLM, Ray and FSDP2 whose processes are stopped, not killed: they exist, and finish nothing.

Each is found and replaced, and the job trains on the same prompts as an undisturbed run. Work of 20 times the usual
time ends nothing.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.local_run import Run

NUM_STEPS = 9
REWARD = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    slow = sum(map(ord, solution_str)) % 40 == 0
    time.sleep(6 if slow else 0.3)  # some rewards take 20 times as long as the others
    return solution_str.count("e") / 10
"""
SETTINGS = (
    f"spec.schedule.steps={NUM_STEPS}",
    "spec.checkpoint.everySteps=1",
    "spec.hangDetection.minSeconds=10",
    "spec.hangDetection.maxSeconds=300",
)
HEAD_PROBES = {
    "startupProbe": {"tcpSocket": {"port": "driver"}, "periodSeconds": 2, "failureThreshold": 150},
    "livenessProbe": {
        "httpGet": {"path": "/rljob/live", "port": "driver"},
        **{"periodSeconds": 2, "failureThreshold": 8, "timeoutSeconds": 2, "terminationGracePeriodSeconds": 2},
    },
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    runs: list[Run] = []

    def start(name: str) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        template = {"spec": {"containers": [{"name": "head", **HEAD_PROBES}]}}
        runs.append(Run(folder, REWARD, *SETTINGS, f"spec.head.template={json.dumps(template)}"))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def stop_and_wait(run: Run, what: str, is_found: Callable[[], bool]) -> None:
    """Stop a process for good. Wait until that is found, and until the step after the one that it was in."""
    pid = run.wait_for(f"a process {what}", lambda: next(iter(run.find(what)), None))
    step, stopped_at = run.num_steps(), time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    run.wait_for(f"the hang of {what} to be found", is_found)
    found_after = time.monotonic() - stopped_at
    run.wait_for_step(step + 2)
    print(f"{what}: found after {found_after:.1f} s, two steps after {time.monotonic() - stopped_at:.1f} s")


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.slow
def test_stopped_processes_are_replaced_and_slow_ones_are_not(start: Callable[[str], Run]) -> None:
    undisturbed = start("undisturbed").finish()
    assert not any(undisturbed.restarts.values()), "rewards of 20 times the median end nothing"

    run = start("stopped")

    def log_of(pod: str) -> str:
        return "".join(path.read_text(errors="replace") for path in (run.folder / "logs").glob(f"*{pod}*.log"))

    run.wait_for_step(2)
    stop_and_wait(run, "ray::RankProcess", lambda: " hangs " in log_of("head"))
    assert "its process does not answer (state T" in log_of("head")
    stop_and_wait(run, "VLLM::EngineCore", lambda: "the engine hangs: " in log_of("rollout"))
    assert "is stopped: it gives no stacks" in log_of("rollout")
    stop_and_wait(run, "-m rljob_trainer.head", lambda: "liveness probe failed" in log_of("head"))
    summary = run.finish()

    assert summary.phase == "Succeeded"
    assert summary.prompts_trained == undisturbed.prompts_trained, "a prompt was skipped or trained on twice"
    for role in ("head", "trainer", "rollout"):
        assert summary.restarts.get(role, 0) >= 1, f"{role}: {summary.restarts}"
    assert len(set(summary.weight_digests.values())) == 1
