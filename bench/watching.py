"""`make bench-watching`: what traces and the live page cost the quickstart, over the same run without them.

Each round runs the quickstart three times, in an order that turns: as it is; with a trace of every episode
(samplingRatio 1), sent to a collector in this process, which reads and drops them; and with `rljob ui` and a client
that reads the page and all its events. Each costs `step`, the median of its steps' seconds, and `cpu`, the CPU
seconds of all its processes, those of `rljob ui` included. Figures are medians over the rounds of the quotient with the
run without both. Runs differ by more than what is looked for, so `own` gives what can be told apart in one run: the CPU
seconds of `rljob ui` over those of the run. Last line: one JSON object.

With `--large N`, it measures instead what `rljob ui` takes of a finished run of N steps with 10 samples of 300 words
each, written to a temporary folder: `page` and `samples`, the seconds until a client has the page, and then its first
samples; `memory`, MiB of the server when it has read everything; `step_bytes`, what the client gets when one more step
ends. `--keep FOLDER` writes the run there, or uses the one that is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from run_job import QUICKSTART, read_steps, run_job

from rljob_api.run.folder import FILE_JOB, FILE_METRICS, TRAJECTORIES, trajectory_file
from rljob_api.run.metrics import append_records, read_metrics

NUM_WARM_UP = 2
"""Steps: the first ones compile."""
MAX_SHARE = 0.02
LARGE_SAMPLES = 10
RECORDED = Path(__file__).resolve().parents[1] / "tests/data/report"
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


def write_large_run(folder: Path, num_steps: int) -> None:
    """Write a run with a training file for each step, an evaluation in each 100th, and an answer of 300 words a
    sample. The recorded run of the tests gives the numbers of its steps."""
    recorded = read_metrics(RECORDED / FILE_METRICS)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(RECORDED / FILE_JOB, folder)
    drawn, words = random.Random(0), [f"word{number}" for number in range(5_000)]
    (folder / TRAJECTORIES).mkdir()
    template = pq.read_table(trajectory_file(RECORDED, 3, "train")).slice(0, LARGE_SAMPLES)
    for step in range(1, num_steps + 1):
        texts = [" ".join(drawn.choices(words, k=300)) for _ in range(LARGE_SAMPLES)]
        changed = {"step": [step] * LARGE_SAMPLES, "completion": texts}
        table = template
        for name, values in changed.items():
            place = table.schema.get_field_index(name)
            table = table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))
        pq.write_table(table, trajectory_file(folder, step, "train"), compression="zstd")
    steps = [
        recorded.steps[step % len(recorded.steps)].model_copy(update={"step": step, "time": 1.8e9 + step})
        for step in range(1, num_steps + 1)
    ]
    evaluations = [
        recorded.evaluations[-1].model_copy(update={"step": step, "time": 1.8e9 + step})
        for step in range(0, num_steps + 1, 100)
    ]
    append_records(folder / FILE_METRICS, [*evaluations, *steps])


def measure_large(run: Path) -> Figures:
    command = [Path(sys.executable).with_name("rljob"), "ui", run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url, figures = server.stdout.readline().strip(), Figures()
            began = time.monotonic()
            page = urllib.request.urlopen(url).read().decode()
            figures["page"], figures["page_bytes"] = time.monotonic() - began, len(page)
            live = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["live"]
            began = time.monotonic()
            urllib.request.urlopen(f"{url}samples").read()
            figures["samples"] = time.monotonic() - began
            while json.loads(urllib.request.urlopen(f"{url}samples").read())["unread"]:
                pass
            figures["all_samples"] = time.monotonic() - began
            with urllib.request.urlopen(f"{url}events?after={live['cursor']}") as events:
                last = read_metrics(run / FILE_METRICS).steps[-1]
                append_records(run / FILE_METRICS, [last.model_copy(update={"step": last.step + 1})])
                size = 0
                while not (line := events.readline()).startswith(b"event: records"):
                    pass
                while line.strip():
                    size, line = size + len(line), events.readline()
            sections = urllib.request.urlopen(f"{url}{live['sections']}").read()
            figures["step_bytes"], figures["sections_bytes"] = size, len(sections)
            process = psutil.Process(server.pid)
            figures["memory"] = process.memory_info().rss / 2**20
            figures["cpu"] = sum(process.cpu_times()[:2])
            return figures
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=18, help="of each run (default 18, as the quickstart)")
    parser.add_argument("--large", type=int, metavar="N", help="measure the page of a run of N steps instead")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of that run")
    options = parser.parse_args()
    if options.large:
        with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
            run = options.keep or Path(folder) / "large"
            if not run.exists():
                write_large_run(run, options.large)
            print(json.dumps(measure_large(run)))
        return
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
