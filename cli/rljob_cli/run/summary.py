"""The summary of a run, as an object and as a table. Pure.

Invariant: metrics.jsonl holds the run's one history, so its lines decide on steps and evaluations; the driver's
summary, which is as old as the last checkpoint, adds what they lack.
"""

import json
import math
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from rljob_api.manifest.evaluation import SHORT_FORM
from rljob_api.quantity import show_bytes
from rljob_api.run.comparisons import Figure
from rljob_api.run.metrics import EvaluationRecord, Metrics, StepRecord
from rljob_api.run.sessions import Session, total_restarts, total_seconds
from rljob_api.run.summaries import DriverSummary, EvaluationSummary, RunSummary
from rljob_inputs.machine.installation import find_builds, run_on_cpus
from rljob_inputs.models.config import EXPORTED_ADAPTER, MIN_MERGED_SHARE

_COUNTED = {
    *("phase_seconds", "training_share", "lost_seconds", "samples_trained", "rewards_served", "invalid_by_reason"),
    "weight_digests",
}
"""Fields of the driver's summary that metrics.jsonl may have, too, and those that it alone has."""
_KNOWN = {
    *("eval_before", "eval_after", "best", "export", "export_step", "export_merged_share", "versions", "model_commit"),
    *("damaged_checkpoints", "trackers"),
}
_Evaluation = TypeVar("_Evaluation", EvaluationRecord, EvaluationSummary)


def build_summary(
    *,
    name: str,
    phase: str,
    total_steps: int,
    driver: DriverSummary | None,
    metrics: Metrics,
    sessions: Sequence[Session],
    checkpoint: int | None,
    template_arguments: Mapping[str, Any] | None = None,
) -> RunSummary:
    """Build summary.json. `driver`: None if the driver wrote none. `template_arguments`: those of the chat template,
    which the export cannot have."""
    known = driver or DriverSummary()
    evaluations = [EvaluationSummary.model_validate(found.model_dump()) for found in metrics.evaluations]
    of_sets = list(group_by_set(evaluations).values())
    before, after = _find_ends(of_sets[0] if of_sets else [], known)
    # Lines that are newer than the last checkpoint are not in the driver's summary.
    counted = known if driver and driver.steps >= len(metrics.steps) else _count(metrics)
    restarts, by_driver = total_restarts(sessions), known.restarts
    return RunSummary(
        name=name,
        phase=phase,
        steps=metrics.last_step,
        total_steps=total_steps,
        checkpoint_step=checkpoint,
        wall_seconds=round(total_seconds(sessions), 3) if sessions else None,
        step_rewards=[step.reward for step in metrics.steps],
        prompts_trained=metrics.prompts_trained,
        accuracy_before=before.accuracy,
        accuracy_after=after.accuracy,
        logprob_difference=list_known(step.logprob_difference for step in metrics.steps),
        restarts={role: restarts.get(role, 0) + by_driver.get(role, 0) for role in sorted({*restarts, *by_driver})},
        pause_seconds=_mean(step.pause_seconds for step in metrics.steps),
        transfer_seconds=_mean(step.transfer_seconds for step in metrics.steps),
        device_bytes=_find_largest(metrics.steps),
        # The samples of each group had equal scores, or none could be trained on.
        steps_without_signal=sum(
            step.zero_signal_share == 1 or 0 < step.num_samples == step.num_masked for step in metrics.steps
        ),
        evaluations=evaluations,
        metrics_before=before.means,
        metrics_after=after.means,
        sessions=list(sessions),
        chat_template_arguments={**(template_arguments or {})},
        **known.model_dump(include=_KNOWN),
        **counted.model_dump(include=_COUNTED),
    )


def sort_phases(summary: RunSummary) -> list[tuple[str, float]]:
    """Return the phases that took time, with their seconds, longest first."""
    return sorted(((name, taken) for name, taken in summary.phase_seconds.items() if taken), key=lambda item: -item[1])


def find_active_seconds(summary: RunSummary) -> float | None:
    """Return the time of which the training share is: that of the driver without the queue. None: unknown."""
    share, lost = summary.training_share, summary.lost_seconds
    active = sum(lost.values()) - lost.get("queue", 0.0)
    return active / (1 - share) if active and share is not None and share < 1 else None


def list_known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    known = list_known(values)
    return sum(known) / len(known) if known else None


def _find_ends(
    evaluations: Sequence[EvaluationSummary], known: DriverSummary
) -> tuple[EvaluationSummary, EvaluationSummary]:
    """Return the evaluation before the first step and the last one after a step; without a number if there is none."""
    if not evaluations:
        before = EvaluationSummary(step=0, accuracy=known.accuracy_before, means=known.eval_before or {})
        return before, EvaluationSummary(step=0, accuracy=known.accuracy_after, means=known.eval_after or {})
    none = EvaluationSummary(step=0)
    last = evaluations[-1]
    return next((found for found in evaluations if found.step == 0), none), last if last.step > 0 else none


def _count(metrics: Metrics) -> DriverSummary:
    """Return what the driver's summary counts, from metrics.jsonl."""
    steps, evaluations = metrics.steps, metrics.evaluations
    records = metrics.records
    phases: defaultdict[str, float] = defaultdict(float)
    for name, seconds in chain.from_iterable(step.phase_seconds.items() for step in steps):
        phases[name] += seconds
    phases["evaluate"] += sum(found.seconds for found in evaluations)
    invalid: Counter[str] = Counter()
    for record in records:
        invalid.update(record.invalid_by_reason)
    num_rewards = max((len(step.rewards) for step in steps), default=1)
    counts = [*(step.num_samples * num_rewards for step in steps), *(found.num_results for found in evaluations)]
    return DriverSummary(
        phase_seconds={name: seconds for name, seconds in phases.items() if seconds},
        samples_trained=sum(step.num_samples - step.num_masked for step in steps) if records else None,
        rewards_served=sum(counts) if records else None,
        invalid_by_reason=invalid,
        training_share=steps[-1].training_share if steps else None,
        lost_seconds=steps[-1].lost_seconds if steps else {},
    )


def _find_largest(steps: Sequence[StepRecord]) -> dict[str, int]:
    """Return the most memory of shared devices that each state held in a step."""
    largest: dict[str, int] = {}
    for name, num_bytes in chain.from_iterable(step.device_bytes.items() for step in steps):
        largest[name] = max(num_bytes, largest.get(name, 0))
    return largest


def build_table(summary: RunSummary) -> Table:
    table = Table(title=f"{summary.name}: {summary.phase}", show_header=False, title_justify="left")
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in summary_lines(summary):
        table.add_row(name, value)
    return table


def summary_lines(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """Yield names and values, the most important first."""
    evaluations = summary.evaluations
    for name, of_set in group_by_set(evaluations).items():
        is_early = of_set[-1].step < summary.total_steps and summary.phase in ("Interrupted", "Failed")
        end = f"{summary.phase.lower()} before the last" if is_early else ""
        yield from _set_lines("" if name == SHORT_FORM else f": {name}", of_set, end)
    if (best := summary.best) is not None:
        bounds = _describe_bounds(best.low, best.high)
        shown = f"{best.step}, by {best.metric} of {best.set}: {best.value:.3f}" + (f" ({bounds})" if bounds else "")
        yield "best step", shown + (f"; {best.checkpoint}" if best.checkpoint else "; it has no checkpoint")
    rewards = [reward for reward in summary.step_rewards if reward is not None]
    if len(rewards) > 1:
        yield "reward", f"{rewards[0]:.3f} -> {rewards[-1]:.3f} over {len(rewards)} steps"
    elif rewards:
        yield "reward", f"{rewards[0]:.3f} (1 step)"
    yield "steps", _describe_progress(summary)
    if without := summary.steps_without_signal:
        yield "steps without signal", f"{without} of {summary.steps}: no sample had an advantage to learn from"
    parts = [f"{name} {seconds:.1f} s" for name, seconds in sort_phases(summary)]
    in_sessions = f" in {len(summary.sessions)} sessions" if len(summary.sessions) > 1 else ""
    wall = "not recorded" if summary.wall_seconds is None else f"{summary.wall_seconds:.1f} s{in_sessions}"
    yield "wall time", wall + (f": {', '.join(parts)}" if parts else "")
    if summary.training_share is not None:
        by_cause = sorted(summary.lost_seconds.items(), key=lambda item: -item[1])
        causes = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in by_cause if seconds)
        shares = [f"{summary.training_share:.0%}"]
        if active := find_active_seconds(summary):
            shares = [f"{summary.training_share:.0%} of {active:.1f} s of the driver"]
            if (wall_seconds := summary.wall_seconds or 0.0) >= active:
                shares.append(f"{summary.training_share * active / wall_seconds:.0%} of the wall time")
        yield "training share", ", ".join(shares) + (f"; lost: {causes}" if causes else "")
    if summary.samples_trained is not None:
        yield "samples trained", str(summary.samples_trained)
    if summary.rewards_served is not None:
        yield "rewards served", f"{summary.rewards_served}, invalid: {_counts(summary.invalid_by_reason)}"
    for name, counts in summary.trackers.items():
        if counts.url:
            yield name, counts.url
    lost = {name: counts.lost + counts.waiting for name, counts in summary.trackers.items()}
    if any(lost.values()):
        yield "records lost", f"{_counts(lost)}; `rljob report --send` sends them from metrics.jsonl"
    yield "restarts", _counts(summary.restarts)
    if summary.pause_seconds is not None:
        transfer = summary.transfer_seconds or 0
        yield "weight updates", f"{summary.pause_seconds:.3f} s pause, {transfer:.3f} s transfer (mean)"
    if held := sorted(summary.device_bytes.items()):
        yield "memory in turns", ", ".join(f"{name.replace('_', ' ')} {show_bytes(size)}" for name, size in held)
    if digests := summary.weight_digests:
        alike = len(set(digests.values())) == 1
        yield "weight digests", f"{len(digests)} processes {'agree' if alike else 'DIFFER'}"


def _set_lines(suffix: str, found: Sequence[EvaluationSummary], end: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of one evaluation set. `suffix`: of the first name. `end`: why the last evaluation is missing."""
    if any(each.accuracy is not None for each in found):
        shown = _from_to([(each.step, each.accuracy) for each in found], end)
        yield f"held-out accuracy{suffix}", "; ".join(filter(None, [shown, *_describe_last(found[-1])]))
    for k in sorted({k for each in found for k in each.pass_at}):
        yield f"  pass@{k}", _from_to([(each.step, each.pass_at.get(k)) for each in found], "")
    if any(each.majority is not None for each in found):
        yield f"  maj@{found[-1].samples_per_prompt}", _from_to([(each.step, each.majority) for each in found], "")
    for component in sorted({name for each in found for name in each.means}):
        yield f"  {component}", _from_to([(each.step, each.means.get(component)) for each in found], "")


def group_by_set(found: Iterable[_Evaluation]) -> dict[str, list[_Evaluation]]:
    """Return evaluations by the name of their set, that of data.eval first."""
    by_set: dict[str, list[_Evaluation]] = {}
    for each in found:
        by_set.setdefault(each.set, []).append(each)
    return dict(sorted(by_set.items(), key=lambda item: item[0] != SHORT_FORM))


def _describe_last(found: EvaluationSummary) -> Iterator[str]:
    if bounds := _describe_bounds(found.accuracy_low, found.accuracy_high):
        yield f"the last {bounds}"
    if counts := describe_uncounted(found):
        yield f"of the last {found.num_samples}: {counts}"


def _describe_bounds(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"95% within {low:.3f} and {high:.3f}"


def describe_uncounted(found: EvaluationRecord | EvaluationSummary | Figure) -> str:
    """Return the episodes of an evaluation that the accuracy counts as 0, and those that it leaves out; empty if there
    are none."""
    counts = {"failed, counted as 0": found.num_failed, "without a score, left out": found.num_left_out}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _describe_progress(summary: RunSummary) -> str:
    if summary.phase == "Succeeded":
        return str(summary.steps)
    if summary.phase == "Running":
        return f"{summary.steps} of {summary.total_steps}"
    checkpoint = summary.checkpoint_step
    again = f"resumes after step {checkpoint}" if checkpoint else "starts over, since there is no checkpoint"
    condition = "if it has stopped, " if summary.phase == "Unfinished" else ""  # or it is in progress elsewhere
    return f"{summary.steps} of {summary.total_steps}; {condition}the same `rljob run` {again}"


def _from_to(points: Sequence[tuple[int, float | None]], note: str) -> str:
    """Describe evaluations, given as (step, value). With one there is no change, and it must not look like one."""

    if len(points) == 1:
        return f"{show_number(points[0][1])} ({'; '.join(filter(None, [f'step {points[0][0]}', note]))})"
    first, last = points[0], points[-1]
    return f"{show_number(first[1])} -> {show_number(last[1])}" + (
        f" (steps {first[0]} and {last[0]}; {note})" if note else ""
    )


def show_number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def _counts(counts: Mapping[str, int]) -> str:
    nonzero = {name: count for name, count in counts.items() if count}
    return ", ".join(f"{name} {count}" for name, count in nonzero.items()) or "none"


def print_summary(console: Console, summary: RunSummary) -> None:
    console.print(build_table(summary))
    if summary.export:
        console.print(f"checkpoint: {summary.export}", soft_wrap=True, highlight=False)
        command = build_serve_command(summary.export, summary.chat_template_arguments)
        console.print(f"serve it with: {command}", soft_wrap=True, highlight=False, markup=False)
        share = summary.export_merged_share
        if share is not None and share < MIN_MERGED_SHARE:
            text = f"its merged weights have {share:.0%} of the adapters' update, and {summary.export}/"
            text += f"{EXPORTED_ADAPTER} has the whole update: serve that instead (docs/lora.md, The result)"
            console.print(text, soft_wrap=True, highlight=False)


def build_serve_command(export: str, template_arguments: Mapping[str, Any]) -> str:
    """Return the command of a server that renders prompts as the job did."""
    arguments = json.dumps(template_arguments, ensure_ascii=False)
    options = f" --default-chat-template-kwargs {shlex.quote(arguments)}" if template_arguments else ""
    # The build for CPUs is a package of another name, without which vLLM's own command does not start.
    python = f"{shlex.quote(sys.executable)} -m vllm.entrypoints.openai.api_server --model"
    server = python if (builds := find_builds()) and run_on_cpus(builds) else "vllm serve"
    return f"{server} {shlex.quote(export)}{options}"
