"""`rljob run` of the tiny job on real vLLM, Ray and FSDP2, observed and killed from outside, for tests of faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import StepRecord, read_metrics
from rljob_api.run.summaries import RunSummary, read_run_summary
from tests.paths import ROOT

RLJOB = Path(sys.executable).with_name("rljob")
JOB = ROOT / "examples/tiny/rljob.yaml"
QUICKSTART = ROOT / "examples/quickstart"
DEADLINE_SECONDS = 420

SLOW_REWARD = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.3)  # a step has a middle in which to die
    return solution_str.count("e") / 10
"""


def find_tracebacks(run: Path) -> list[str]:
    """Return where the logs of a run have tracebacks, or errors of an engine."""
    logs = sorted((run / "logs").glob("*.log"))
    assert logs, "the run has logs"
    lines = [(log, line) for log in logs for line in log.read_text(errors="replace").splitlines()]
    return [f"{log.name}: {line}" for log, line in lines if "Traceback (most recent" in line or "EngineDead" in line]


def run_to_end(job: Path, folder: Path, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a job with plain output, which has its errors, too."""
    return subprocess.run(
        [RLJOB, "run", job, "--dir", folder, "--output", "plain"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_seconds,
        env=os.environ | {"COLUMNS": "200"},
        check=False,
    )


class Run:
    """One `rljob run` of the tiny job, observed from outside."""

    def __init__(self, folder: Path, reward: str | None, *settings: str) -> None:
        """`reward`: its source; None: the job is in the folder already."""
        self.folder = folder / "tiny"
        if reward is not None:
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
        return read_metrics(self.folder / FILE_METRICS).last_step

    def kill(self, what: str) -> None:
        """Send SIGKILL to the run's first process whose command line contains `what`, except its Pod's supervisor."""
        pid = self.wait_for(f"a process {what}", lambda: next(iter(self.find(what)), None))
        os.kill(pid, signal.SIGKILL)

    def find(self, what: str) -> list[int]:
        processes = psutil.Process(self.process.pid).children(recursive=True)
        lines = {process.pid: command_line(process) for process in processes}
        return sorted(pid for pid, line in lines.items() if what in line and "podshim" not in line)

    def finish(self) -> RunSummary:
        """Return the summary of the run, which must succeed and leave no process behind."""
        processes = psutil.Process(self.process.pid).children(recursive=True)
        assert self.process.wait(DEADLINE_SECONDS) == 0, self.tail()
        left = [line for process in processes if process.is_running() and (line := command_line(process))]
        assert not left, f"left behind: {left}"
        last_line = (self.folder.parent / "output.txt").read_text().splitlines()[-1]
        summary = read_run_summary(Path(last_line).parent)
        assert summary is not None, last_line
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


def wait_for_turn(run: Run, turn: str) -> None:
    """Wait until the first Pod's engine is asked to begin its next `turn`."""
    log = run.folder / "logs" / "tiny-trainer-0.log"

    def count() -> int:
        return log.read_text().count(f"turn: {turn}")

    before = count()
    run.wait_for(f"turn: {turn}", lambda: count() > before)


def command_line(process: psutil.Process) -> str:
    """Return the command line; empty for a process that has ended, or a zombie."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # includes zombies
        return ""


def run_beside_killed(
    start: Callable[[Path], Run], folder: Path, *, head_at: int, rank_at: int
) -> tuple[Sequence[StepRecord], Sequence[StepRecord], RunSummary]:
    """Return the steps of an undisturbed run, and those and the summary of one whose head is killed at a step, and
    later a rank. `start`: starts the run in a new folder."""
    undisturbed, killed = start(folder / "undisturbed"), None
    try:
        undisturbed.finish()
        killed = start(folder / "killed")
        killed.wait_for_step(head_at)
        killed.kill("-m rljob_trainer.head")
        killed.wait_for_step(rank_at)
        killed.kill("ray::RankProcess")
        summary = killed.finish()
    finally:
        for run in (undisturbed, killed):
            if run is not None:
                run.close()
    expected, found = (read_metrics(run.folder / FILE_METRICS).steps for run in (undisturbed, killed))
    return expected, found, summary
