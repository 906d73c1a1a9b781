"""`rljob run` on real vLLM, Ray and FSDP2 with faults: SIGKILL of every role during a step, and a failing reward.

Resume is exact: the job succeeds, and trains on the same prompts as an undisturbed run. A failure of a reward is never
a zero: every tenth call raises, hangs or returns NaN, and its sample is masked and counted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.paths import ROOT

RLJOB = Path(sys.executable).with_name("rljob")
JOB = ROOT / "examples/tiny/rljob.yaml"
QUICKSTART = ROOT / "examples/quickstart"
DEADLINE_SECONDS = 420
NUM_STEPS = 12

SLOW_REWARD = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.3)  # a step has a middle in which to die
    return solution_str.count("e") / 10
"""
FAILING_REWARD = """
import random, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    fate = hash((extra_info["index"], solution_str)) % 30
    if fate == 0:
        raise RuntimeError("no")
    if fate == 1:
        time.sleep(60)
    if fate == 2:
        return float("nan")
    return 1.0
"""


class Run:
    """One `rljob run` of the tiny job, observed from outside."""

    def __init__(self, folder: Path, reward: str, *settings: str) -> None:
        self.folder = folder / "tiny"
        (folder / "reward.py").write_text(reward)
        # The example's sources are relative to its file, and this copy is in another folder.
        text = JOB.read_text().replace("../../.models", f"{ROOT}/.models").replace("../quickstart", str(QUICKSTART))
        (folder / "rljob.yaml").write_text(text)
        command = [RLJOB, "run", folder / "rljob.yaml", "--dir", folder, "--no-call"]  # a tenth of the calls fails
        for setting in settings:
            command += ["--set", setting]
        self.output = (folder / "output.txt").open("w+")
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT)

    def wait_for(self, what: str, condition: Callable[[], Any]) -> Any:
        """Return the first true value of `condition`. Fail if the run ends or the deadline passes first."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            assert self.process.poll() is None, f"the run ended before {what}\n{self.tail()}"
            time.sleep(0.05)
        pytest.fail(f"no {what} within {DEADLINE_SECONDS} s\n{self.tail()}")

    def wait_for_step(self, step: int) -> None:
        self.wait_for(f"step {step}", lambda: self.num_steps() >= step)

    def num_steps(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return max((json.loads(line)["step"] for line in lines if '"type": "step"' in line), default=0)

    def kill(self, what: str) -> None:
        """Send SIGKILL to the run's first process whose command line contains `what`, except its Pod's supervisor."""
        pid = self.wait_for(f"a process {what}", lambda: next(iter(self.find(what)), None))
        os.kill(pid, signal.SIGKILL)

    def find(self, what: str) -> list[int]:
        processes = psutil.Process(self.process.pid).children(recursive=True)
        lines = {process.pid: command_line(process) for process in processes}
        return sorted(pid for pid, line in lines.items() if what in line and "podshim" not in line)

    def finish(self) -> dict[str, Any]:
        """Return the summary of the run, which must succeed and leave no process behind."""
        processes = psutil.Process(self.process.pid).children(recursive=True)
        assert self.process.wait(DEADLINE_SECONDS) == 0, self.tail()
        left = [line for process in processes if process.is_running() and (line := command_line(process))]
        assert not left, f"left behind: {left}"
        last_line = (self.folder.parent / "output.txt").read_text().splitlines()[-1]
        summary: dict[str, Any] = json.loads(Path(last_line).read_text())
        return summary

    def tail(self) -> str:
        self.output.flush()
        logs = sorted((self.folder / "logs").glob("*.log"))
        texts = [(self.folder.parent / "output.txt"), *logs]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in texts if path.exists())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # all of its processes die with it
            self.process.wait()
        self.output.close()


def command_line(process: psutil.Process) -> str:
    """Return the command line; empty for a process that has ended, or a zombie."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # includes zombies
        return ""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(name: str, reward: str, *settings: str) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        runs.append(Run(folder, reward, *settings))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.mark.real
@pytest.mark.slow
def test_sigkill_of_each_role_skips_and_repeats_no_prompt(start: Callable[..., Run]) -> None:
    steps = f"spec.schedule.steps={NUM_STEPS}"
    undisturbed = start("undisturbed", SLOW_REWARD, steps).finish()

    run = start("killed", SLOW_REWARD, steps, "spec.checkpoint.everySteps=3")
    run.wait_for_step(1)
    run.kill("rljob_reward.worker")
    run.wait_for_step(2)
    run.kill("-m rljob_reward ")
    run.wait_for_step(4)
    run.kill("ray::RankProcess")
    run.wait_for_step(6)
    run.kill("-m rljob_trainer.rollout")
    run.wait_for_step(8)
    run.kill("-m rljob_trainer.head")
    summary = run.finish()

    assert summary["phase"] == "Succeeded"
    assert summary["prompts_trained"] == undisturbed["prompts_trained"], "a prompt was skipped or trained on twice"
    assert len(summary["prompts_trained"]) == NUM_STEPS
    restarts = summary["restarts"]
    for role in ("head", "trainer", "rollout", "reward-letters"):
        assert restarts.get(role, 0) >= 1, f"{role} was killed, but its restart is not counted: {restarts}"
    assert len(set(summary["weight_digests"].values())) == 1, "every rollout must serve what the trainer published"


@pytest.mark.real
def test_failing_reward_is_masked_and_counted_but_never_zero(start: Callable[..., Run]) -> None:
    summary = start(
        "failing",
        FAILING_REWARD,
        "spec.rewards=[{name: letters, function: {file: reward.py}, timeoutSeconds: 1, failurePolicy: {retries: 0}}]",
        "spec.schedule.promptsPerStep=8",
        "spec.schedule.steps=3",
    ).finish()

    assert set(summary["invalid_by_reason"]) <= {"exception", "timeout", "not_finite"}
    assert sum(summary["invalid_by_reason"].values()) > 0
    # Every valid score is 1: a failure that counted as zero would lower the mean of its step.
    assert summary["step_rewards"] == [1.0] * len(summary["step_rewards"])
