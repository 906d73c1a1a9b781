"""Step time with slow rewards, for each schedule, in one run: what hides the rewards, and what does not.

The published setting, 20 times faster: GSM8K, groups of 5, and a reward of U(1, 40) s / 20. Each schedule has as many
reward slots as the autoscaler decides; `fixed_256` is onPolicy with the published number, one slot per 20 samples of a
step (256 for 5,120), and --fixed adds it for the other schedules. Runs real vLLM and FSDP2 under `rljob run`.

A floor is the same job with a reward that answers at once: `floor` for the schedules without staleness, and
`floor_bounded` (bounded, 2) for the bounded ones. A step's time is the mean over the measured steps, from the end of
the one before them to the end of the last: those of warm-up, and those at the end for which nothing is sampled, are
left out. Writes a timeline of what each role did (docs/images/overlap.png). Last line: one JSON object with
`ratio_sync`, `ratio_on_policy`, `ratio_bounded_1`, `ratio_bounded_2` and `ratio_fixed_256`: step over floor.

The fixed slots are comparable only if the rest of a step takes the published 251 s / 20 = 12.5 s; see --prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from run_job import read_steps, run_job
from timeline import Timeline, busy_shares, draw

ROOT = Path(__file__).parents[1]
HERE = ROOT / "bench/overlap"
JOB = ROOT / "examples/gsm8k/rljob.yaml"
PLOT_PATH = ROOT / "docs/images/overlap.png"
GROUP_SIZE = 5
LOW_SECONDS, HIGH_SECONDS = 1 / 20, 40 / 20
SAMPLES_PER_SLOT = 5120 // 256
PUBLISHED_STEP_SECONDS = 251 / 20
SLOTS_PER_POD = 4
NUM_WARM_UP = 3
"""Steps: the first one compiles, the autoscaler measures, and a bounded schedule fills its pipeline."""
NUM_DRAINED = 2
"""Steps at the end for which a bounded schedule samples nothing: the largest bound here."""
START_SECONDS = 90.0
"""Until the first step: vLLM, Ray and FSDP2 start. For the estimate alone."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"type": "synchronous"},
    "on_policy": {"type": "onPolicy"},
    "bounded_1": {"type": "bounded", "maxStaleness": 1},
    "bounded_2": {"type": "bounded", "maxStaleness": 2},
}
LABELS = {
    "floor": "onPolicy, rewards of 0 s (floor)",
    "floor_bounded": "bounded 2, rewards of 0 s (floor)",
    "sync": "synchronous, autoscaled rewards",
    "on_policy": "onPolicy, autoscaled rewards",
    "bounded_1": "bounded 1, autoscaled rewards",
    "bounded_2": "bounded 2, autoscaled rewards",
    "fixed_256": "onPolicy, the published number of slots",
    "sync_fixed_256": "synchronous, the published number of slots",
    "bounded_1_fixed_256": "bounded 1, the published number of slots",
    "bounded_2_fixed_256": "bounded 2, the published number of slots",
}
FLOORS = ("floor", "floor_bounded")


@dataclass(frozen=True)
class Variant:
    name: str
    schedule: dict[str, Any]
    reward: dict[str, Any]
    """Its kwargs, and what serves it."""

    @property
    def floor(self) -> str:
        return "floor_bounded" if self.schedule["type"] == "bounded" else "floor"


def build_variants(num_samples: int, *, has_all_fixed: bool) -> list[Variant]:
    wait = {"low": LOW_SECONDS, "high": HIGH_SECONDS}
    at_once = {"replicas": 1, "slots": 8, "kwargs": {}}
    fixed = {"replicas": 1, "slots": max(1, num_samples // SAMPLES_PER_SLOT), "kwargs": wait}
    # With staleness, the samples of several steps wait for their rewards.
    scaling = {"minReplicas": 0, "maxReplicas": -(-3 * num_samples // SLOTS_PER_POD)}
    scaled = {"slots": SLOTS_PER_POD, "autoscaling": scaling, "kwargs": wait}
    names = [*(f"{name}_fixed_256" for name in SCHEDULES if name != "on_policy")] if has_all_fixed else []
    return [
        Variant("floor", SCHEDULES["on_policy"], at_once),
        Variant("floor_bounded", SCHEDULES["bounded_2"], at_once),
        *(Variant(name, schedule, scaled) for name, schedule in SCHEDULES.items()),
        Variant("fixed_256", SCHEDULES["on_policy"], fixed),
        *(Variant(name, SCHEDULES[name.removesuffix("_fixed_256")], fixed) for name in names),
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
    function = {"file": str(HERE / "reward.py"), "kwargs": reward.pop("kwargs")}
    spec["rewards"] = [{"name": "correct", "function": function, "queueLength": 65536, **reward}]
    spec["algorithm"]["groupSize"] = GROUP_SIZE
    num_steps = NUM_WARM_UP + arguments.steps + NUM_DRAINED
    spec["schedule"] = {"steps": num_steps, "promptsPerStep": arguments.prompts, "seed": 0, **variant.schedule}
    # One thread each, as with separate devices: on shared cores, roles that overlap would only slow each other down.
    spec["trainer"] |= {"replicas": 1, "env": {"OMP_NUM_THREADS": "1"}}
    spec.setdefault("rollout", {})["env"] = {"OMP_NUM_THREADS": "1"}
    spec["rollout"]["sampling"] = {"maxTokens": arguments.max_tokens}
    spec["checkpoint"] = {"everySteps": num_steps, "export": "never"}
    command = [sys.executable, str(HERE / "timeline_head.py")]
    spec["head"] = {"template": {"spec": {"containers": [{"name": "head", "command": command}]}}}
    return job


def run_variant(variant: Variant, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with one variant. Raise CalledProcessError if the job fails."""
    folder = arguments.dir / variant.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rljob.yaml"
    path.write_text(yaml.safe_dump(build_job(variant, arguments), sort_keys=False))
    summary = run_job(path, folder / "run", {})
    steps = read_steps(summary)
    before, measured = steps[NUM_WARM_UP - 1], steps[NUM_WARM_UP : NUM_WARM_UP + arguments.steps]
    ends, timeline = [step.time or 0.0 for step in (before, *measured)], summary.with_name("timeline.jsonl")
    phases = {
        name: statistics.mean(step.phase_seconds.get(name, 0.0) for step in measured)
        for name in ("generate", "score", "update", "publish", "sync")
    }
    return {
        "step_seconds": (ends[-1] - ends[0]) / len(measured),
        "step_seconds_median": statistics.median(step.step_seconds or 0.0 for step in measured),
        "num_steps": len(measured),
        "num_invalid": sum(step.num_invalid for step in steps),
        "staleness_max": max((step.staleness_max or 0 for step in measured), default=0),
        "busy_shares": {role: round(share, 3) for role, share in busy_shares(timeline, ends[0], ends[-1]).items()},
        "phase_seconds": {name: round(seconds, 2) for name, seconds in phases.items()},
        "timeline": str(timeline),
        "step_ends": ends,
    }


def run_all(variants: list[Variant], arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run each variant, and print how far the benchmark is. Raise SystemExit if the floor is too short."""
    results: dict[str, dict[str, Any]] = {}
    console = Console(stderr=True)
    for number, variant in enumerate(variants, 1):
        started_at = time.monotonic()
        row = results[variant.name] = run_variant(variant, arguments)
        seconds = time.monotonic() - started_at
        console.print(
            f"{number}/{len(variants)} {variant.name}: {row['step_seconds']:.1f} s a step; took {seconds / 60:.1f} min"
        )
        if number == 1:
            if row["step_seconds"] < arguments.min_floor:
                raise SystemExit(f"the floor is below {arguments.min_floor:g} s: raise --prompts or --max-tokens")
            print_estimate(variants[1:], row["step_seconds"], arguments, console)
    return results


def print_estimate(variants: list[Variant], floor: float, arguments: argparse.Namespace, console: Console) -> None:
    num_steps = NUM_WARM_UP + arguments.steps + NUM_DRAINED
    rewards = arguments.prompts * GROUP_SIZE * (LOW_SECONDS + HIGH_SECONDS) / 2
    seconds = 0.0
    for variant in variants:
        num_slots = variant.reward["slots"] if "fixed_256" in variant.name else float("inf")
        seconds += START_SECONDS + num_steps * (1.2 * floor + rewards / num_slots)
    console.print(f"about {seconds / 60:.0f} min for the other {len(variants)} variants")


def print_table(results: dict[str, dict[str, Any]], ratios: dict[str, float]) -> None:
    roles = ("rollouts", "rewards", "trainer")
    table = Table("variant", "step s", "median", "ratio", *(f"{role} busy" for role in roles), "staleness", "invalid")
    for name, row in results.items():
        shares = [f"{row['busy_shares'][role]:.0%}" for role in roles]
        cells = [f"{row['step_seconds']:.2f}", f"{row['step_seconds_median']:.2f}", f"{ratios.get(name, 1.0):.3f}"]
        table.add_row(LABELS[name], *cells, *shares, str(row["staleness_max"]), str(row["num_invalid"]))
    Console(width=140).print(table)
    floor = results["floor"]["step_seconds"]
    Console().print(f"A step without rewards takes {floor:.1f} s here; {PUBLISHED_STEP_SECONDS:.1f} s would match.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="measured steps; warm-up and drained ones come on top")
    parser.add_argument("--prompts", type=int, default=6, help="prompts per step, each sampled 5 times")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--min-floor", type=float, default=12.0, help="stop if a step of the floor takes fewer seconds")
    parser.add_argument("--fixed", action="store_true", help="the published number of slots with all schedules")
    parser.add_argument("--only", nargs="+", choices=list(LABELS), help="variants to run in addition to the floors")
    parser.add_argument("--plot", type=Path, default=PLOT_PATH)
    parser.add_argument("--dir", type=Path, default=ROOT / "runs/bench-overlap")
    arguments = parser.parse_args()
    variants = [
        variant
        for variant in build_variants(arguments.prompts * GROUP_SIZE, has_all_fixed=arguments.fixed)
        if not arguments.only or variant.name in (*FLOORS, *arguments.only)
    ]
    results = run_all(variants, arguments)
    ratios = {v.name: results[v.name]["step_seconds"] / results[v.floor]["step_seconds"] for v in variants}
    print_table(results, ratios)
    timelines = [Timeline(LABELS[name], Path(row["timeline"]), row["step_ends"]) for name, row in results.items()]
    draw(timelines, arguments.plot, {LABELS[name]: ratio for name, ratio in ratios.items() if name not in FLOORS})
    found = {f"ratio_{name}": round(ratio, 3) for name, ratio in ratios.items() if name not in FLOORS}
    floors = {f"{name}_seconds": round(results[name]["step_seconds"], 2) for name in FLOORS}
    print(json.dumps({**found, **floors, "variants": results}))


if __name__ == "__main__":
    main()
