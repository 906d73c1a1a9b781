"""Kill -9 of every role, one at a time, in the middle of a step, through `rljob run` on real vLLM, Ray and FSDP2.

Owns the promise of exact resume: the job succeeds, and it trained on the same prompts as a run that nothing disturbed.
Also that a failing reward is never a zero: every tenth call raises, hangs or returns NaN, and is masked and counted.
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
    """One `rljob run` of the tiny job, watched from outside as a user would."""

    def __init__(self, folder: Path, reward: str, *settings: str) -> None:
        self.folder = folder / "tiny"
        (folder / "reward.py").write_text(reward)
        # The sources of the example are relative to its file, which this copy leaves.
        text = JOB.read_text().replace("../../.models", f"{ROOT}/.models").replace("../quickstart", str(QUICKSTART))
        (folder / "rljob.yaml").write_text(text)
        command = [RLJOB, "run", folder / "rljob.yaml", "--dir", folder]
        for setting in settings:
            command += ["--set", setting]
        self.output = (folder / "output.txt").open("w+")
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT)

    def wait_for(self, what: str, condition: Callable[[], Any]) -> Any:
        """The first true value of `condition`. Fails when the run ends or the deadline passes before."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            assert self.process.poll() is None, f"the run ended before {what}\n{self.tail()}"
            time.sleep(0.05)
        pytest.fail(f"{what} did not come within {DEADLINE_SECONDS} s\n{self.tail()}")

    def wait_for_step(self, step: int) -> None:
        self.wait_for(f"step {step}", lambda: self.num_steps() >= step)

    def num_steps(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return max((json.loads(line)["step"] for line in lines if '"type": "step"' in line), default=0)

    def kill(self, what: str) -> None:
        """SIGKILL the first process below the run whose command line holds `what`, the supervisor of its Pod apart."""
        pid = self.wait_for(f"a process {what}", lambda: next(iter(self.find(what)), None))
        os.kill(pid, signal.SIGKILL)

    def find(self, what: str) -> list[int]:
        lines = {pid: command_line(pid) for pid in descendants(self.process.pid)}
        return sorted(pid for pid, line in lines.items() if what in line and "podshim" not in line)

    def finish(self) -> dict[str, Any]:
        """The summary of a run that must succeed and leave no process behind."""
        below = descendants(self.process.pid)
        assert self.process.wait(DEADLINE_SECONDS) == 0, self.tail()
        left = [pid for pid in below if command_line(pid)]
        assert not left, f"left behind: {[command_line(pid) for pid in left]}"
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
            self.process.kill()  # everything below dies with it
            self.process.wait()
        self.output.close()


def descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: set[int] = set()
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found


def command_line(pid: int) -> str:
    """Empty for a process that is gone, or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
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
def test_kill_9_of_each_role_skips_no_prompt_and_doubles_none(start: Callable[..., Run]) -> None:
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
        assert restarts.get(role, 0) >= 1, f"{role} was killed, but its restart is not told: {restarts}"
    assert len(set(summary["weight_digests"].values())) == 1, "every rollout serves what the trainer published"


@pytest.mark.real
def test_a_reward_that_fails_is_masked_and_counted_and_never_a_zero(start: Callable[..., Run]) -> None:
    summary = start(
        "failing",
        FAILING_REWARD,
        "spec.rewards=[{name: letters, function: {file: reward.py}, timeoutSeconds: 1, failurePolicy: {retries: 0}}]",
        "spec.schedule.promptsPerStep=8",
    ).finish()

    assert set(summary["invalid_by_reason"]) <= {"exception", "timeout", "not_finite"}
    assert sum(summary["invalid_by_reason"].values()) > 0
    # Every valid score is 1: a single failure that counted as zero would show in the mean of its step.
    assert summary["step_rewards"] == [1.0] * len(summary["step_rewards"])
