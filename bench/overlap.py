"""Step time with slow rewards: synchronous batch scoring, streamed scoring with fixed slots or with the autoscaler.

The published setting, 20 times faster: GSM8K, groups of 5, a reward of U(1, 40) s / 20, and one slot per 20 samples of
a step (256 for 5,120). Runs real vLLM and FSDP2 under `rljob run`. The floor is the same job with a reward that takes
no time. Last line: one JSON object; a ratio is a variant's median step time over the floor's.

The slots are comparable only if the rest of a step takes the published 251 s / 20 = 12.5 s. The table shows the
measured time; choose --prompts to match.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from run_job import read_steps, run_job

ROOT = Path(__file__).parents[1]
HERE = ROOT / "bench/overlap"
JOB = ROOT / "examples/gsm8k/rljob.yaml"
GROUP_SIZE = 5
LOW_SECONDS, HIGH_SECONDS = 1 / 20, 40 / 20
SAMPLES_PER_SLOT = 5120 // 256
PUBLISHED_STEP_SECONDS = 251 / 20
SLOTS_PER_POD = 2


@dataclass(frozen=True)
class Variant:
    """One way to score."""

    name: str
    label: str
    reward: dict[str, Any]
    """Changes to the job's reward."""
    head: dict[str, Any] = field(default_factory=dict)


def build_variants(num_samples: int) -> list[Variant]:
    num_slots = max(1, num_samples // SAMPLES_PER_SLOT)
    wait = {"low": LOW_SECONDS, "high": HIGH_SECONDS}
    fixed = {"replicas": 1, "slots": num_slots, "kwargs": wait}
    command = [sys.executable, str(HERE / "sync_head.py")]
    synchronous = {"template": {"spec": {"containers": [{"name": "head", "command": command}]}}}
    scaled = {
        "slots": SLOTS_PER_POD,
        "kwargs": wait,
        "autoscaling": {"minReplicas": 0, "maxReplicas": -(-num_samples // SLOTS_PER_POD)},
    }
    return [
        Variant("floor", "a reward of 0 s", {"replicas": 1, "slots": 8, "kwargs": {}}),
        Variant("sync", f"batch scoring after the rollout, {num_slots} slots", fixed, synchronous),
        Variant("fixed_256", f"streamed, {num_slots} slots", fixed),
        Variant("autoscaler", f"streamed, 0 to {num_samples} slots by demand", scaled),
    ]


def build_job(variant: Variant, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the job's manifest, with absolute paths."""
    job: dict[str, Any] = yaml.safe_load(JOB.read_text())
    spec = job["spec"]
    job["metadata"]["name"] = variant.name.replace("_", "-")
    spec["model"]["source"] = str(ROOT / ".models/smollm2-135m-instruct")
    spec["data"]["train"]["source"] = str(ROOT / "examples/gsm8k/data/train.jsonl")
    del spec["data"]["eval"], spec["evaluation"]
    reward = dict(variant.reward)
    kwargs = reward.pop("kwargs")
    function = {"file": str(HERE / "reward.py"), "kwargs": kwargs}
    spec["rewards"] = [{"name": "correct", "function": function, "queueLength": 65536, **reward}]
    spec["algorithm"]["groupSize"] = GROUP_SIZE
    spec["schedule"] = {"steps": arguments.steps, "promptsPerStep": arguments.prompts, "seed": 0}
    spec["trainer"]["replicas"] = 1
    spec["rollout"]["sampling"] = {"maxTokens": arguments.max_tokens}
    spec["head"] = variant.head
    return job


def run_variant(variant: Variant, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with one variant. Raise CalledProcessError if the job fails."""
    folder = arguments.dir / variant.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rljob.yaml"
    path.write_text(yaml.safe_dump(build_job(variant, arguments), sort_keys=False))
    steps = read_steps(run_job(path, folder / "run", {}))
    phases = {
        name: statistics.median(step["phase_seconds"].get(name, 0.0) for step in steps)
        for name in ("generate", "score", "update", "publish", "sync")
    }
    return {
        "step_seconds": statistics.median(step["step_seconds"] for step in steps),
        "num_invalid": sum(step["num_invalid"] for step in steps),
        **phases,
    }


def print_table(variants: list[Variant], results: dict[str, dict[str, Any]], floor: float) -> None:
    table = Table("variant", "step s", "ratio", "generate s", "unhidden reward s", "update s", "invalid")
    for variant in variants:
        row = results[variant.name]
        cells = [row["step_seconds"], row["step_seconds"] / floor, row["generate"], row["score"], row["update"]]
        table.add_row(variant.label, *(f"{cell:.2f}" for cell in cells), str(row["num_invalid"]))
    Console().print(table)
    Console().print(f"A step without rewards takes {floor:.1f} s here; {PUBLISHED_STEP_SECONDS:.1f} s would match.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step, each sampled 5 times")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--only", nargs="+", help="names of variants to run in addition to the floor")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs/bench-overlap")
    arguments = parser.parse_args()
    variants = [
        variant
        for variant in build_variants(arguments.prompts * GROUP_SIZE)
        if not arguments.only or variant.name in ("floor", *arguments.only)
    ]
    results = {variant.name: run_variant(variant, arguments) for variant in variants}
    floor = results["floor"]["step_seconds"]
    print_table(variants, results, floor)
    ratios = {
        f"ratio_{name}": round(row["step_seconds"] / floor, 3) for name, row in results.items() if name != "floor"
    }
    print(json.dumps({**ratios, "floor_seconds": round(floor, 2), "variants": results}))


if __name__ == "__main__":
    main()
