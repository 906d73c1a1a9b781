"""Run a job with `rljob run`, and read its metrics, for the benchmarks that compare whole runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import EvaluationRecord, StepRecord, read_metrics
from rljob_api.run.summaries import read_run_summary

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


def read_steps(summary: Path) -> tuple[StepRecord, ...]:
    """Return the metrics of all steps."""
    return read_metrics(summary.with_name(FILE_METRICS)).steps


class Measured(NamedTuple):
    """A run, and its means of held-out prompts."""

    seconds: float
    before: dict[str, float]
    after: dict[str, float]
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]


def measure_job(job: Path, folder: Path, overrides: Mapping[str, object]) -> Measured:
    """Run a job. Raise CalledProcessError if it fails."""
    started_at = time.monotonic()
    path = run_job(job, folder, overrides)
    seconds, summary = round(time.monotonic() - started_at, 1), read_run_summary(path.parent)
    assert summary is not None, path
    before, after = (
        {name: value for name, value in means.items() if value is not None}
        for means in (summary.metrics_before, summary.metrics_after)
    )
    metrics = read_metrics(path.with_name(FILE_METRICS))
    return Measured(seconds, before, after, metrics.steps, metrics.evaluations)
