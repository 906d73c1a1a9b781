"""Run a job with `rljob run`, and read its metrics, for the benchmarks that compare whole runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).parents[1] / "examples/quickstart/rljob.yaml"


def run_job(job: Path, folder: Path, overrides: Mapping[str, object]) -> Path:
    """Run a job without its checkpoints; return the path of its summary. Raise CalledProcessError if it fails."""
    command = [Path(sys.executable).with_name("rljob"), "run", job, "--dir", folder, "--fresh"]
    for field, value in overrides.items():
        command += ["--set", f"spec.{field}={value}"]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    summary = Path(ended.stdout.strip().splitlines()[-1])
    # Several GB each: the runs of one benchmark would fill a disk.
    shutil.rmtree(summary.with_name("checkpoints"), ignore_errors=True)
    return summary


def read_records(summary: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of one type: step or eval."""
    records = [json.loads(line) for line in summary.with_name("metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["type"] == kind]


def read_steps(summary: Path) -> list[dict[str, Any]]:
    """Return the metrics of all steps except the first one, which warms up."""
    return read_records(summary, "step")[1:]


def measure_job(job: Path, folder: Path, overrides: Mapping[str, object]) -> dict[str, Any]:
    """Run a job; return its metrics of held-out prompts before and after, its seconds and the path of its summary.

    Raise CalledProcessError if it fails.
    """
    started_at = time.monotonic()
    path = run_job(job, folder, overrides)
    summary = json.loads(path.read_text())
    return {
        "seconds": round(time.monotonic() - started_at, 1),
        "before": summary["metrics_before"],
        "after": summary["metrics_after"],
        "summary": str(path),
    }
