"""A real run with a slow reward, and its live page in a browser: for a test, and to draw docs/images/ui.png."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml
from playwright.sync_api import Page

from rljob_api.run.folder import FILE_JOB
from tests.paths import ROOT
from tests.support.browser import launch_chromium
from tests.support.local_run import DEADLINE_SECONDS, JOB, QUICKSTART, RLJOB, Run

SLOW = """
import hashlib
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    drawn = hashlib.sha256(solution_str.encode()).digest()[0] / 255
    time.sleep(0.2 + 2 * drawn)  # some answers take ten times as long as others
    if drawn > 0.85:
        raise ValueError("no verdict in the judge's answer")
    return solution_str.count("e") / 10
"""
QUICK = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1 / (1 + len(solution_str))
"""
STEPS = 6
_WIDTH, _HEIGHT = 900, 1000


def write_job(folder: Path) -> None:
    """Write the tiny job with a slow reward, which fails for some answers, and a quick one."""
    job = yaml.safe_load(JOB.read_text())
    spec = job["spec"]
    spec["model"]["source"] = str(ROOT / ".models/tiny-qwen3")
    for name in ("train", "eval"):
        spec["data"][name]["source"] = str(QUICKSTART / f"data/{name}.jsonl")
    spec["rewards"] = [
        {"name": "judge", "function": {"inline": SLOW}, "slots": 2},
        {"name": "brevity", "function": {"inline": QUICK}, "weight": 0.5},
    ]
    spec["schedule"]["steps"] = STEPS
    (folder / "rljob.yaml").write_text(yaml.safe_dump(job))


class LiveRun:
    """A run, and the process that serves its page."""

    def __init__(self, folder: Path, page: Page) -> None:
        write_job(folder)
        self.run = Run(folder, None)
        self.run.wait_for("the run's folder", lambda: (self.run.folder / FILE_JOB).exists())
        self.server = subprocess.Popen([RLJOB, "ui", self.run.folder], stdout=subprocess.PIPE, text=True)
        assert self.server.stdout is not None
        self.page = page
        page.set_default_timeout(DEADLINE_SECONDS * 1000)
        page.goto(self.server.stdout.readline().strip())

    def wait_for_step_on_page(self, step: int) -> None:
        announced = "Number(/^step ([0-9]+)/.exec(document.getElementById('announce').textContent)?.[1])"
        self.page.wait_for_function(f"step => {announced} >= step", arg=step)

    def server_cpu_seconds(self) -> float:
        times = psutil.Process(self.server.pid).cpu_times()
        return times.user + times.system

    def run_cpu_seconds(self) -> float:
        """Return the CPU time of the processes of the run that live."""
        found = psutil.Process(self.run.process.pid)
        times = [each.cpu_times() for each in (found, *found.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def close(self) -> None:
        self.run.close()
        self.server.terminate()
        self.server.wait()


@contextmanager
def open_live_run(folder: Path) -> Iterator[LiveRun]:
    with launch_chromium() as browser:
        live = LiveRun(folder, browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT}))
        try:
            yield live
        finally:
            live.close()
