"""`make bench-start`: what the start of a run costs, in CPU seconds and in time.

From `rljob run` of the quickstart to the end of its first step, with the evaluation before it.

CPU seconds are those of all processes that the run has started, ended ones included, and by program. With
--against FOLDER, another checkout of RLJob takes turns with this one, in the same environment. Figures are medians over
the rounds, with their ranges. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from run_job import QUICKSTART

from rljob_api.run.folder import FILE_METRICS

ROOT = Path(__file__).parents[1]
DEADLINE_SECONDS = 600.0
_POLL_SECONDS = 0.2
_PR_SET_CHILD_SUBREAPER = 36
_PROGRAMS = {
    "rank": r"^ray::RankProcess",
    "raylet, gcs": r"raylet/raylet|gcs_server",
    "agents of Ray": r"^ray::(Dash|Runtime)|ray/dashboard|agent/main",
    "log monitors of Ray": r"log_monitor",
    "client server of Ray": r"client\.server",
    "ray start": r"ray.* start --",
    "other of Ray": r"^ray|/ray/",
    "head": r"rljob_trainer\.head",
    "worker": r"rljob_trainer\.worker",
    "engine": r"VLLM::",
    "vLLM's server": r"rljob_trainer\.rollout|vllm",
    "reward": r"rljob_service",
    "cli": r"rljob",
}
"""Patterns of command lines; the first one that is found counts."""


def measure(checkout: Path) -> dict[str, object]:
    """Run the quickstart of `checkout` until its first step has ended. Return the seconds."""
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
        command = [Path(sys.executable).with_name("rljob"), "run", QUICKSTART, "--dir", folder, "--fresh"]
        packages = {path.parents[1] for path in checkout.glob("*/rljob_*/__init__.py")}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages))}
        log = Path(folder, "output")
        started, before = time.monotonic(), _cpu_of_children()
        with log.open("w") as output:
            run = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        used: dict[int, tuple[str, float]] = {}
        metrics = Path(folder, "quickstart", FILE_METRICS)
        try:
            while not _has_step(metrics):
                if run.poll() is not None or time.monotonic() - started > DEADLINE_SECONDS:
                    sys.exit(f"the run had no step; its output: {log.read_text()[-3000:]}")
                used.update(_read_processes())
                time.sleep(_POLL_SECONDS)
            seconds, total = time.monotonic() - started, _cpu_of_children() - before + sum(_cpu_of_living())
            used.update(_read_processes())
        finally:
            _end(run)
    by_program: dict[str, float] = defaultdict(float)
    for name, cpu in used.values():
        by_program[name] += cpu
    return {"cpu": total, "seconds": seconds, "by program": dict(by_program), "processes": len(used)}


def _has_step(metrics: Path) -> bool:
    with contextlib.suppress(OSError):
        return '"step_seconds":' in metrics.read_text()
    return False


def _read_processes() -> Iterator[tuple[int, tuple[str, float]]]:
    """Yield what each process of the run has used alone, by its number, with the name of its program."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command, times = " ".join(process.cmdline()), process.cpu_times()
            name = next((name for name, pattern in _PROGRAMS.items() if re.search(pattern, command)), "others")
            yield process.pid, (name, times.user + times.system)


def _cpu_of_living() -> Iterator[float]:
    """Yield what each process has used, with its children that have ended."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            yield sum(process.cpu_times()[:4])


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _end(run: subprocess.Popen[bytes]) -> None:
    """End the run with all that it has started, and wait for it: nothing of it may run beside the next one."""
    if run.poll() is None:
        run.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(60)
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.05)


def _summarize(rounds: list[dict[str, dict[str, object]]]) -> dict[str, Mapping[str, list[float]]]:
    """Return the median, the least and the greatest of each figure, by checkout."""
    return {
        name: {
            each: [round(f(found[name][each] for found in rounds), 1) for f in (statistics.median, min, max)]  # type: ignore[type-var]
            for each in ("cpu", "seconds")
        }
        for name in rounds[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout of RLJob")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent is counted here
    checkouts = {"this": ROOT} | ({"other": options.against.resolve()} if options.against else {})
    rounds = []
    for index in range(options.rounds):
        names = list(checkouts)[:: 1 if index % 2 == 0 else -1]
        rounds.append({name: measure(checkouts[name]) for name in names})
        print(f"round {index + 1}: {json.dumps(rounds[-1])}", file=sys.stderr, flush=True)
    result: dict[str, object] = {"figures": _summarize(rounds), "rounds": rounds}
    if options.against:
        ratios = [found["this"]["cpu"] / found["other"]["cpu"] for found in rounds]  # type: ignore[operator]
        result["cpu of the other"] = round(statistics.median(ratios), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
