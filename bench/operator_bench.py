"""`make bench-operator`: what many jobs cost the operator, and as many RayClusters KubeRay's.

Each operator runs as a process with its Lease and its probe, on a separate control plane with KWOK's nodes, on the
same machine, one after the other. All objects are submitted at once. With --window, only that many wait to run at a
time: thousands at once on a small machine measure the controllers of Kubernetes. Measures Pods per second, requests to
the API server per object until it runs, CPU and memory of the operator, the cost while all run (with drivers that
answer as those of training jobs), and a restart by kill -9. Last line: one JSON object. What one operator gave before
an error is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from operator_load import kuberay, rljob
from operator_load.measure import Load, crds_of, run_measurement
from operator_load.plane import CONSOLE, run_plane

Figures = dict[str, Any]
_RATIOS = {
    "pods_per_second": ("pods_per_second",),
    "requests_per_object": ("requests_per_object", "all"),
    "burst_cpu_seconds": ("burst_cpu_seconds",),
    "peak_mib": ("peak_mib",),
    "steady_cores": ("steady", "cores"),
    "steady_rss_mib": ("steady", "rss_mib"),
}


def load_of(options: argparse.Namespace) -> Load:
    return Load(options.jobs, options.window, options.seconds)


def measure_rljob(options: argparse.Namespace, folder: Path, figures: Figures) -> None:
    figures["hung_drivers"] = options.hung
    with (
        run_plane(folder, options.address, crds_of(rljob.CRDS)) as plane,
        rljob.run_drivers(options.hung, folder / "logs/drivers.log"),
    ):
        subject = rljob.build_subject(plane)
        run_measurement(plane, subject, figures, load_of(options), rljob.count_answers)


def measure_kuberay(options: argparse.Namespace, folder: Path, figures: Figures) -> None:
    figures |= {"version": kuberay.VERSION, "arguments": options.kuberay_arguments.split() or "as shipped"}
    built = kuberay.find_or_build(options.kuberay_source)
    with run_plane(folder, options.address, crds_of(built / "crds")) as plane:
        arguments = options.kuberay_arguments.split()
        subject = kuberay.build_subject(plane, built / "operator", rljob.PODS_PER_JOB, arguments)
        run_measurement(plane, subject, figures, load_of(options))


@contextlib.contextmanager
def record_error(figures: Figures) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        CONSOLE.print(traceback.format_exc(), markup=False, highlight=False)
        found = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        figures["error"] = f"{type(found).__name__}: {found}"[:1000]


def compare(ours: Figures, theirs: Figures) -> Figures:
    """Our figure over theirs."""
    ratios: Figures = {}
    for name, path in _RATIOS.items():
        values: list[Any] = [ours, theirs]
        for key in path:
            values = [value.get(key) if isinstance(value, dict) else None for value in values]
        if all(values):
            ratios[name] = round(values[0] / values[1], 2)
    return ratios


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200, help="objects of each operator (default 200)")
    parser.add_argument("--window", type=int, help="objects submitted that do not run yet (default: all at once)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of measurement while all run (default 60)")
    parser.add_argument("--hung", type=float, default=0.0, help="share of the drivers that never answer (default 0)")
    parser.add_argument("--only", choices=["rljob", "kuberay"], help="measure one operator")
    parser.add_argument("--kuberay-source", default=kuberay.SOURCE, help="git repository: a folder or a URL")
    parser.add_argument(
        "--kuberay-arguments", default="", help="instead of what it ships: '--reconcile-concurrency=10 --qps=1000'"
    )
    parser.add_argument("--address", default="127.36.0.1", help="loopback address of the control planes")
    parser.add_argument("--dir", type=Path, help="keep the control planes' data and all logs in this new folder")
    options = parser.parse_args()
    for name in ("jobs", "window"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    return options


def main() -> int:
    options = parse()
    halves: dict[str, Callable[[argparse.Namespace, Path, Figures], None]] = {
        "rljob": measure_rljob,
        "kuberay": measure_kuberay,
    }
    results: dict[str, Figures] = {}
    with contextlib.ExitStack() as stack:
        folder = options.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-operator-")))
        for name, measure in halves.items():
            if options.only in (None, name):
                results[name] = {}
                with record_error(results[name]):
                    measure(options, folder / name, results[name])
                CONSOLE.log(f"{name}: {json.dumps(results[name])}")
    ratios = compare(results.get("rljob", {}), results.get("kuberay", {}))
    print(json.dumps({"jobs": options.jobs, "window": options.window, **results, "rljob_over_kuberay": ratios}))
    return int(any("error" in figures for figures in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
