"""`make bench-watching`: what traces and the live page cost the quickstart, over the same run without them.

Each round runs the quickstart three times, in an order that turns: as it is; with a trace of every episode
(samplingRatio 1), sent to a collector in this process, which reads and drops them; and with `rljob ui` and a client
that reads the page and all its events. Each costs `step`, the median of its steps' seconds, and `cpu`, the CPU
seconds of all its processes, those of `rljob ui` included. Figures are medians over the rounds of the quotient with the
run without both. Runs differ by more than what is looked for, so `own` gives what can be told apart in one run: the CPU
seconds of `rljob ui` over those of the run. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from run_job import QUICKSTART, read_steps, run_job

from rljob_api.run.folder import FILE_JOB

NUM_WARM_UP = 2
"""Steps: the first ones compile."""
MAX_SHARE = 0.02
Figures = dict[str, float]
Overrides = Mapping[str, object]
Observer = Callable[[Path, Figures], AbstractContextManager[Overrides]]
"""Gets the folder of the runs, watches the one that will be there, and gives the settings that it needs. Adds the CPU
seconds of a process of its own to the figures."""


@contextlib.contextmanager
def watch_nothing(runs: Path, figures: Figures) -> Iterator[Overrides]:
    yield {}


@contextlib.contextmanager
def collect_traces(runs: Path, figures: Figures) -> Iterator[Overrides]:
    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {"tracing.endpoint": f"http://127.0.0.1:{server.server_port}", "tracing.samplingRatio": 1}
    finally:
        server.shutdown()


@contextlib.contextmanager
def open_page(runs: Path, figures: Figures) -> Iterator[Overrides]:
    stop = threading.Event()
    reader = threading.Thread(target=_read_page, args=(runs / "quickstart", figures, stop))
    reader.start()
    try:
        yield {}
    finally:
        stop.set()
        reader.join()


def _read_page(run: Path, figures: Figures, stop: threading.Event) -> None:
    while not (run / FILE_JOB).exists():
        if stop.wait(0.2):
            return
    command = [Path(sys.executable).with_name("rljob"), "ui", run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            urllib.request.urlopen(url).read()
            with urllib.request.urlopen(f"{url.rstrip('/')}/events") as events:
                while not stop.is_set() and events.readline():  # a silent run sends a line now and then
                    pass
            used = psutil.Process(server.pid).cpu_times()
            figures["own"] = used.user + used.system
        finally:
            server.terminate()


OBSERVERS: dict[str, Observer] = {"plain": watch_nothing, "traces": collect_traces, "page": open_page}


def measure(observer: Observer, steps: int) -> Figures:
    """Return the seconds of a step and the CPU seconds of a run under an observer."""
    before, figures = _cpu_of_children(), Figures()
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
        with observer(Path(folder), figures) as overrides:
            summary = run_job(QUICKSTART, Path(folder), {"schedule.steps": steps, **overrides})
        seconds = [each.step_seconds for each in read_steps(summary)[NUM_WARM_UP:] if each.step_seconds]
    return {"step": statistics.median(seconds), "cpu": _cpu_of_children() - before, **figures}


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=18, help="of each run (default 18, as the quickstart)")
    options = parser.parse_args()
    console, rounds, names = Console(stderr=True), list[dict[str, Figures]](), list(OBSERVERS)
    for index in range(options.rounds):
        found = {}
        for name in names[index % len(names) :] + names[: index % len(names)]:
            found[name] = measure(OBSERVERS[name], options.steps)
            console.log(f"round {index + 1}, {name}: {found[name]}")
        rounds.append(found)
    table, shares = Table(title=f"{options.rounds} rounds of {options.steps} steps"), dict[str, Figures]()
    for heading in ("", "step", "more", "CPU of the run", "more"):
        table.add_column(heading)
    for name in names:
        medians = {each: statistics.median(found[name][each] for found in rounds) for each in ("step", "cpu")}
        shares[name] = {
            each: statistics.median(found[name][each] / found["plain"][each] - 1 for found in rounds)
            for each in medians
        }
        cells = [text for each in medians for text in (f"{medians[each]:.2f} s", f"{100 * shares[name][each]:+.1f} %")]
        table.add_row(name, *cells)
    console.print(table)
    shares["page"]["own"] = statistics.median(found["page"]["own"] / found["page"]["cpu"] for found in rounds)
    console.print(f"rljob ui itself: {100 * shares['page']['own']:.2f} % of the run's CPU time")
    del shares["plain"]
    print(json.dumps({"shares": shares, "rounds": rounds, "limit": MAX_SHARE}))


if __name__ == "__main__":
    main()
