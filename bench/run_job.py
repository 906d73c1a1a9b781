"""Run a job with `rljob run`, and read its metrics, for the benchmarks that compare whole runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_job(job: Path, folder: Path, overrides: Mapping[str, object]) -> Path:
    """Run a job without its checkpoints; return the path of its summary. Raise CalledProcessError if it fails."""
    command = [Path(sys.executable).with_name("rljob"), "run", job, "--dir", folder, "--fresh"]
    for field, value in overrides.items():
        command += ["--set", f"spec.{field}={value}"]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(ended.stdout.strip().splitlines()[-1])


def read_steps(summary: Path) -> list[dict[str, Any]]:
    """Return the metrics of all steps except the first one, which warms up."""
    records = [json.loads(line) for line in summary.with_name("metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["type"] == "step"][1:]
