"""Samples per second of the quickstart's model: `rljob run`, then TRL's GRPOTrainer.

Both use the same model, prompts, reward, group size, prompts per step, token limit, cores and dtype: fp32 master
weights, and bf16 compute if the CPUs have its instructions, which `rljob run` decides, else fp32. The learning rate is
almost 0, so that the length of completions does not change. The first step is excluded (warm-up). A step lasts from its
first prompt until the new weights are served. Last line: one JSON object with `ratio`, RLJob's rate over TRL's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from run_job import read_steps, run_job
from trl_run import EXAMPLE, MAX_TOKENS, run_trl

LEARNING_RATE = 1e-9


def run_ours(steps: int, folder: Path) -> dict[str, Any]:
    """Run the quickstart, and return the metrics of all steps except the first."""
    overrides = {
        "schedule.steps": steps,
        "data.eval": "null",
        "algorithm.optimizer.learningRate": LEARNING_RATE,
        "checkpoint.everySteps": steps,
        "checkpoint.exportPolicy": "never",
        "rollout.sampling.maxTokens": MAX_TOKENS,
    }
    measured = read_steps(run_job(EXAMPLE / "rljob.yaml", folder, overrides))[1:]  # the first one warms up
    phases = sorted({name for record in measured for name in record.phase_seconds})
    return {
        "step_seconds": [record.step_seconds for record in measured],
        "tokens": [record.num_tokens for record in measured],
        "phase_seconds": {
            name: statistics.mean(record.phase_seconds.get(name, 0.0) for record in measured) for name in phases
        },
    }


def report(ours: dict[str, Any], trl: dict[str, Any], num_samples: int) -> dict[str, float]:
    """Print the tables, and return the results."""
    step, other = statistics.mean(ours["step_seconds"]), statistics.mean(trl["step_seconds"])
    console = Console()
    table = Table("", "s per step", "samples/s", "tokens per step", title=f"{num_samples} samples per step")
    for name, mean, tokens in (("rljob", step, ours["tokens"]), ("TRL", other, trl["tokens"])):
        table.add_row(name, f"{mean:.2f}", f"{num_samples / mean:.2f}", f"{statistics.mean(tokens):.0f}")
    console.print(table)
    phases = Table("phase", "s per step", "share", title="RLJob's time by phase")
    for name, seconds in sorted(ours["phase_seconds"].items(), key=lambda item: -item[1]):
        phases.add_row(name, f"{seconds:.2f}", f"{seconds / step:.0%}")
    rest = step - sum(ours["phase_seconds"].values())
    phases.add_row("(rest)", f"{rest:.2f}", f"{rest / step:.0%}")
    console.print(phases)
    return {
        "ratio": round(other / step, 3),
        "samples_per_second": round(num_samples / step, 3),
        "trl_samples_per_second": round(num_samples / other, 3),
        **{f"{name}_seconds": round(seconds, 3) for name, seconds in ours["phase_seconds"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="steps of both runs; the first one is not counted")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    job = yaml.safe_load((EXAMPLE / "rljob.yaml").read_text())["spec"]
    num_samples = job["schedule"]["promptsPerStep"] * job["algorithm"]["groupSize"]
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as scratch:
        ours = run_ours(arguments.steps, Path(scratch))
        found = run_trl(Path(scratch), steps=arguments.steps, learning_rate=LEARNING_RATE)
    trl = {name: found[name][1:] for name in ("step_seconds", "tokens")}
    print(json.dumps(report(ours, trl, num_samples)))


if __name__ == "__main__":
    main()
