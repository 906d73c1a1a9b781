"""`make accept-gpu`: whether a machine with one GPU does what docs/gpus.md says, in at most 40 minutes.

Runs the checks of acceptance/checks.py one after the other: the doctor, kernels against rows alone, jobs on one GPU
that trainer and rollouts share, resuming, digests, offloads, running out of memory on purpose, and two benchmarks. On
CPUs it runs the reduced form, which skips what needs a GPU. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from acceptance.checks import ROOT, build_checks
from acceptance.runner import Result, run_checks
from rich.console import Console
from rich.table import Table

from rljob_cli.local.node.gpus import describe_gpus, find_gpus

_STATES = {"held": "held", "failed": "FAILED", "skipped": "skipped"}


def main() -> int:
    options = _parse()
    gpus = [] if options.reduced else find_gpus()
    device = next((gpu.name for gpu in describe_gpus()), "a GPU") if gpus else "CPUs"
    names, checks = options.only, build_checks(bool(gpus), options.dir)
    if unknown := set(names) - {check.name for check in checks}:
        raise SystemExit(f"--only must be one of {', '.join(check.name for check in checks)}, got {', '.join(unknown)}")
    shutil.rmtree(options.dir, ignore_errors=True)
    # Rollouts of the reduced form, and torch, see no GPU. Trainer and rollouts see one.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus[0] if gpus else ""}
    wanted = [check for check in checks if not names or check.name in names]
    results: list[Result] = []
    for result in run_checks(wanted, options.dir / "logs", has_gpu=bool(gpus), folder=ROOT, environment=environment):
        results.append(result)
        print(f"{result.name}: {_STATES[result.state]}, {result.found}", file=sys.stderr, flush=True)
    ok = all(result.state != "failed" for result in results)
    if options.output == "json":
        print(json.dumps({"ok": ok, "device": device, "checks": [asdict(result) for result in results]}, indent=2))
    else:
        _show(results, device)
    return 0 if ok else 1


def _show(results: Sequence[Result], device: str) -> None:
    table = Table("check", "", "found", "seconds", "log", title=f"Acceptance on {device}")
    for result in results:
        log = os.path.relpath(result.log) if result.log and result.state == "failed" else ""
        table.add_row(result.name, _STATES[result.state], result.found, f"{result.seconds:.0f}", log)
    Console().print(table)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="run this check; repeatable")
    parser.add_argument("--reduced", action="store_true", help="the form for CPUs, also next to GPUs")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs/accept-gpu", help="runs and logs; emptied first")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
