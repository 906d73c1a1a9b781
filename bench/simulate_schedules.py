"""Predict a step's time for each schedule: slow rewards in the published 7B setting, and long-tail generation.

A discrete-event simulation with the driver's dispatcher and schedules. Prints tables and one JSON object, and writes
docs/images/schedules-simulated.png. Seeds are fixed, so that the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from schedule_simulation import arithmetic
from schedule_simulation.roles import Lengths, Shape, Uniform
from schedule_simulation.simulation import Simulation, step_seconds
from schedule_simulation.tail_rounds import TailRounds

from rljob_api.manifest.scaling import Autoscaling
from rljob_api.manifest.schedule import Schedule
from rljob_api.wire.driver_status import RewardDemand
from rljob_core.backend import Demand
from rljob_core.plan.autoscale import ScalingPolicy, decide_replicas
from rljob_trainer.driver.schedules import Streaming, build_schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_PATH = Path(__file__).parents[1] / "docs/images/schedules-simulated.png"
SCHEDULES: dict[str, dict[str, Any]] = {
    "synchronous": {"type": "synchronous"},
    "onPolicy": {"type": "onPolicy"},
    "oneStepOff": {"type": "oneStepOff"},
    "bounded 1": {"type": "bounded", "maxStaleness": 1},
    "bounded 2": {"type": "bounded", "maxStaleness": 2},
    "bounded 4": {"type": "bounded", "maxStaleness": 4},
    "bounded 6": {"type": "bounded", "maxStaleness": 6},
}
AHEAD = {"bounded 2": 1, "bounded 4": 2, "bounded 6": 3}
"""Schedules that are also simulated with groups for fewer steps ahead than the bound. The driver does not do this."""
SLOTS_PER_POD = 16
NUM_STEPS, SKIPPED_STEPS = 24, 8
"""Steps of a simulation; the first steps fill the pipeline."""
SHORT_STEPS, SHORT_SKIPPED = 12, 4
"""Steps of one with 5,120 samples per step, whose steps are alike."""
ROUNDS, SKIPPED_ROUNDS, OVERCOMMITS = 60, 10, (1.1, 1.25, 1.5)
ROLLOUT_GPUS, TRAINER_GPUS = 2, 6


def build_published_shape(slots: int) -> Shape:
    """Return 1,024 prompts x 5 samples, whose generation and training take the published seconds on shared GPUs."""
    shape = Shape(
        groups_per_step=1024,
        group_size=5,
        mini_batches=arithmetic.MINI_BATCHES,
        lengths=Lengths(median=200, sigma=0.3, longest=1024),
        reward_seconds=arithmetic.REWARD,
        slots=slots,
        sequences=1024,
        sequence_speed=1.0,
        half_speed_at=math.inf,
        train_tokens_per_second=math.inf,
        shares_gpus=True,
    )
    probe = Simulation(shape, build_schedule(Schedule()))
    probe.run(1)
    tokens = sum(probe.steps[0].tokens)
    generated_at = max(moment for moment, running in probe.timeline.rollouts if running)
    return dataclasses.replace(
        shape,
        sequence_speed=generated_at / arithmetic.GENERATE,
        train_tokens_per_second=tokens / (arithmetic.LOGPROB + arithmetic.UPDATE),
    )


def split_gpus(shape: Shape) -> Shape:
    """Return the shape with dedicated GPUs per role and without the pass for log-probs, if speeds are proportional."""
    total = ROLLOUT_GPUS + TRAINER_GPUS
    training = (arithmetic.LOGPROB + arithmetic.UPDATE) / arithmetic.UPDATE
    return dataclasses.replace(
        shape,
        sequence_speed=shape.sequence_speed * ROLLOUT_GPUS / total,
        train_tokens_per_second=shape.train_tokens_per_second * training * TRAINER_GPUS / total,
        publish_seconds=4.0,
        shares_gpus=False,
    )


LONG_TAIL = Shape(
    groups_per_step=64,
    group_size=8,
    mini_batches=4,
    lengths=Lengths(median=2500, sigma=1.1, longest=32768),
    reward_seconds=Uniform(0.5, 4.0),
    slots=128,
    sequences=512,
    sequence_speed=80.0,
    half_speed_at=512.0,
    train_tokens_per_second=20_000.0,
    publish_seconds=4.0,
)


def autoscaled_slots(due_seconds: float) -> int:
    """Return the slots that the operator's autoscaler chooses if a step's rewards are due within these seconds."""
    demand = RewardDemand(
        samples=arithmetic.SAMPLES,
        is_open=True,
        expected=arithmetic.SAMPLES,
        latency_seconds=arithmetic.REWARD.mean,
        latency_p95_seconds=arithmetic.REWARD.low + 0.95 * (arithmetic.REWARD.high - arithmetic.REWARD.low),
        due_seconds=due_seconds,
        window_seconds=due_seconds,
    )
    policy = ScalingPolicy("reward", Autoscaling.model_validate({"maxReplicas": 4096}), SLOTS_PER_POD)
    decision = decide_replicas(policy, [Demand("job", demand)], None, datetime(2026, 1, 1, tzinfo=UTC))
    return decision.replicas * SLOTS_PER_POD


def due_seconds(free: Simulation) -> float:
    """Return how long a step's rewards may take, as the driver's forecaster learns it from the last step
    (docs/scaling.md). `free`: the schedule with a slot for each sample."""
    begin, end = free.steps[-2].ended_at, free.steps[-1].ended_at
    trains = [(at, until) for at, until in free.timeline.trains if begin <= at < end]
    train = sum(until - at for at, until in trains)
    if free.schedule.max_staleness:
        curve = [(at, running) for at, running in free.timeline.rollouts if begin <= at <= end]
        busy = sum(later - at for (at, running), (later, _) in itertools.pairwise(curve) if running)
        return max(train, busy)
    sampled = [at - begin for at in free.timeline.sampled.values() if begin < at <= end]
    generate = max(sampled)
    if not isinstance(free.schedule, Streaming):
        return generate
    return max(generate, min(sampled) + train * (1 - 1 / len(sampled)))


def simulate(shape: Shape, name: str, num_steps: int = NUM_STEPS, steps_ahead: int | None = None) -> Simulation:
    return Simulation(shape, build_schedule(Schedule.model_validate(SCHEDULES[name])), steps_ahead).run(num_steps)


def summarize(simulation: Simulation, skip: int = SKIPPED_STEPS) -> dict[str, float]:
    steps, since = simulation.steps[skip:], simulation.steps[skip - 1].ended_at
    seconds = step_seconds(simulation, skip)
    staleness = [value for step in steps for value in step.staleness]
    training = sum(end - begin for begin, end in simulation.timeline.trains if begin >= since)
    return {
        "step_seconds": round(seconds, 1),
        "staleness_mean": round(statistics.mean(staleness), 2),
        "staleness_max": max(staleness),
        "trainer_share": round(training / (seconds * len(steps)), 3),
    }


def predict_slow_rewards(shape: Shape) -> dict[str, dict[str, dict[str, float]]]:
    """Return schedule -> slots -> summary."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in ("synchronous", "onPolicy", "bounded 1", "bounded 2"):
        simulations = {
            slots: simulate(dataclasses.replace(shape, slots=slots), name, SHORT_STEPS) for slots in (256, 1024, 5120)
        }
        chosen = autoscaled_slots(due_seconds(simulations[5120]))
        autoscaled = simulate(dataclasses.replace(shape, slots=chosen), name, SHORT_STEPS)
        results[name] = {
            **{str(slots): {"slots": slots, **summarize(run, SHORT_SKIPPED)} for slots, run in simulations.items()},
            "autoscaled": {"slots": chosen, **summarize(autoscaled, SHORT_SKIPPED)},
        }
    return results


def predict_tail_rounds() -> dict[str, dict[str, float]]:
    results = {}
    for overcommit in OVERCOMMITS:
        rounds = TailRounds(LONG_TAIL, overcommit)
        ends = rounds.run(ROUNDS)
        trained = sum(sum(rounds.draw(group)[0]) for group in rounds.trained)
        results[f"tail rounds {overcommit}"] = {
            "step_seconds": round((ends[-1] - ends[SKIPPED_ROUNDS - 1]) / (ROUNDS - SKIPPED_ROUNDS), 1),
            "lost_share": round(rounds.lost_tokens / (rounds.lost_tokens + trained), 3),
        }
    return results


def print_published() -> None:
    table = Table("published setting, from arithmetic", "256 slots", "512", "1,024", "5,120", title="s per step")
    rows = {
        "rewards after generation, updates after all scores": arithmetic.synchronous,
        "on-policy mini-batches": arithmetic.on_policy,
        "one step off": arithmetic.one_step_off,
    }
    for label, compute in rows.items():
        table.add_row(label, *(f"{compute(slots):.0f}" for slots in (256, 512, 1024, 5120)))
    Console(width=120).print(table)
    published = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in arithmetic.PUBLISHED.items())
    Console(width=120).print(f"published: {published}")


def print_slow_rewards(title: str, results: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table("schedule", "256 slots", "1,024", "5,120", "autoscaled (slots)", title=f"{title}: s per step")
    for name, row in results.items():
        fixed = [f"{row[slots]['step_seconds']:.0f}" for slots in ("256", "1024", "5120")]
        scaled = row["autoscaled"]
        table.add_row(name, *fixed, f"{scaled['step_seconds']:.0f} ({scaled['slots']})")
    Console(width=120).print(table)


def print_long_tail(results: dict[str, dict[str, float]], floor: float) -> None:
    table = Table(
        "schedule", "s per step", "over floor", "staleness", "trainer works", "tokens lost", title="long tail"
    )
    for name, row in results.items():
        staleness = f"{row['staleness_mean']:.1f}" if "staleness_mean" in row else "0"
        works = f"{row['trainer_share']:.0%}" if "trainer_share" in row else ""
        lost = f"{row['lost_share']:.0%}" if "lost_share" in row else "0"
        seconds = row["step_seconds"]
        table.add_row(name, f"{seconds:.0f}", f"{seconds / floor:.2f}", staleness, works, lost)
    Console(width=120).print(table)
    Console(width=120).print(f"floor: {floor:.0f} s, in which the trainer always works")


def draw(simulations: dict[str, Simulation], bars: dict[str, float], floor: float, path: Path) -> None:
    """Draw a window of each simulation's roles, and the step's time by schedule."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(simulations) + 1,
        1,
        figsize=(11, 1.5 * len(simulations) + 3.2),
        height_ratios=[1.0] * len(simulations) + [1.9],
    )
    for axis, (name, simulation) in zip(axes, simulations.items(), strict=False):
        draw_timeline(axis, simulation, name)
    axes[0].legend(loc="upper right", fontsize=7, ncols=3, framealpha=1.0)
    axes[len(simulations) - 1].set_xlabel("s")
    axis = axes[-1]
    colors = ["#6baed6" if name in SCHEDULES else "#bdbdbd" for name in bars]
    axis.bar_label(axis.barh(list(bars), list(bars.values()), color=colors), fmt="%.0f", fontsize=8, padding=2)
    axis.axvline(floor, color="#d94801", lw=1)
    axis.set_title(f"seconds per step; line: {floor:.0f} s, in which the trainer always works", loc="left", fontsize=9)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_timeline(axis: Axes, simulation: Simulation, name: str, window: float = 1200.0) -> None:
    begin = simulation.steps[SKIPPED_STEPS - 1].ended_at
    curve = [(at - begin, running) for at, running in simulation.timeline.rollouts if 0 <= at - begin <= window]
    axis.fill_between(
        [at for at, _ in curve],
        [running for _, running in curve],
        step="post",
        color="#9ecae1",
        lw=0,
        label="sequences",
    )
    top = simulation.shape.sequences
    for spans, color, label in (
        (simulation.timeline.trains, "#31a354", "trainer works"),
        (simulation.timeline.publishes, "#d94801", "weights"),
    ):
        bars = [(at - begin, end - at) for at, end in spans if -window < at - begin <= window]
        axis.broken_barh(bars, (-0.3 * top, 0.22 * top), color=color, lw=0, label=label)
    axis.set_xlim(0, window)
    axis.set_ylim(-0.35 * top, 1.1 * top)
    axis.set_yticks([0, top])
    axis.tick_params(labelsize=7)
    axis.set_title(name, loc="left", fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=PLOT_PATH)
    arguments = parser.parse_args()
    print_published()
    shared = build_published_shape(arithmetic.SLOTS)
    slow = predict_slow_rewards(shared)
    print_slow_rewards("GPUs in turn, as published", slow)
    split = predict_slow_rewards(split_gpus(shared))
    print_slow_rewards(f"{ROLLOUT_GPUS} rollout and {TRAINER_GPUS} trainer GPUs, no pass for log-probs", split)

    simulations = {name: simulate(LONG_TAIL, name) for name in SCHEDULES}
    long_tail = {name: summarize(simulation) for name, simulation in simulations.items()}
    floor = LONG_TAIL.publish_seconds + statistics.mean(
        sum(step.tokens) / LONG_TAIL.train_tokens_per_second
        for simulation in simulations.values()
        for step in simulation.steps
    )
    for name, ahead in AHEAD.items():
        long_tail[f"{name}, {ahead} ahead"] = summarize(simulate(LONG_TAIL, name, steps_ahead=ahead))
    long_tail |= predict_tail_rounds()
    print_long_tail(long_tail, floor)
    shown = ("synchronous", "onPolicy", "bounded 1", "bounded 4")
    bars = {name: row["step_seconds"] for name, row in long_tail.items()}
    draw({name: simulations[name] for name in shown}, bars, floor, arguments.plot)
    print(
        json.dumps(
            {
                "published": arithmetic.PUBLISHED,
                "arithmetic_256": {
                    "synchronous": round(arithmetic.synchronous(256), 1),
                    "on_policy": round(arithmetic.on_policy(256), 1),
                    "one_step_off": round(arithmetic.one_step_off(256), 1),
                    "floor": round(arithmetic.FLOOR, 1),
                },
                "gpus_in_turn": slow,
                "gpus_per_role": split,
                "long_tail": {"floor": round(floor, 1), **long_tail},
            }
        )
    )


if __name__ == "__main__":
    main()
