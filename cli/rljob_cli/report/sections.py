"""What the sections of a report count: failures, rewards, and waits between roles. Pure.

Failures: counts are of the whole run, from metrics.jsonl; messages are from the samples that the report read.

Waits: a step's time is the driver's: `generate` up to the last token, then `score` until the last reward, `update`,
`publish` and `sync`; on shared devices also `sleep` and `wake`. Invariant: the seconds of each role add up to the time
of the steps.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from rljob_api.run.metrics import Metrics, StepRecord
from rljob_api.run.summaries import RunSummary
from rljob_api.run.trajectories import ResultRow, SampleRow
from rljob_cli.run.summary import find_active_seconds, list_known, sort_phases

_OWNERS = {
    **dict.fromkeys(("generate", "sync", "wake"), "rollouts"),
    **dict.fromkeys(("update", "publish", "sleep"), "trainer"),
    "score": "rewards",
}
"""Phase -> the role that works in it, or that gets its turn. In `sync` the rollouts load weights. All others are the
driver's."""
ROLES = ("rollouts", "rewards", "trainer", "head")


@dataclass(frozen=True)
class RoleTime:
    role: str
    works_seconds: float
    waits_seconds: dict[str, float] = field(default_factory=dict)
    """By the role that it waits for."""


def build_role_times(steps: Sequence[StepRecord]) -> list[RoleTime]:
    """Return one entry per role; empty without a step."""
    total = sum(step.step_seconds or 0.0 for step in steps)
    worked: defaultdict[str, float] = defaultdict(float)
    for step in steps:
        for phase, seconds in step.phase_seconds.items():
            worked[_OWNERS.get(phase, "head")] += seconds
    if not total:
        return []
    # What no phase covers is the driver's own time.
    worked["head"] += max(0.0, total - sum(worked.values()))
    return [
        RoleTime(role, worked[role], {other: worked[other] for other in ROLES if other != role and worked[other]})
        for role in ROLES
    ]


@dataclass(frozen=True)
class PhaseTime:
    name: str
    seconds: float
    share: float
    """Share of the wall time."""
    meaning: str


_MEANINGS = {
    "starting": "the driver waits for the trainer group",
    "evaluate": "held-out prompts: generation and rewards",
    "generate": "rollouts sample; rewards score what has ended",
    "score": "rewards, after the last token: the part that nothing overlaps",
    "update": "log-probs and optimizer steps",
    "publish": "the trainer gathers and writes its weights",
    "sync": "rollouts load the weights",
    "sleep": "rollouts free the shared devices, and the trainer's state returns to them",
    "wake": "the trainer's state leaves the shared devices, and rollouts get their memory back",
    "checkpoint": "checkpoints and the export",
}


_CAUSES = {
    "start": "from the start of the driver to its first step",
    "checkpoint": "training waited for a checkpoint or the export",
    "evaluation": "training waited for held-out prompts",
    "restart": "steps that were repeated, and from the death of a driver to the next one",
    "hung": "a rank of the trainer, or the driver, finished nothing until it was replaced",
    "outage": "something that the job depends on did not answer, and training waited",
    "queue": "after an orderly end of the driver, such as a suspension; not in the share",
}


def build_lost_times(summary: RunSummary) -> list[PhaseTime]:
    """Return the time that did not train by cause, the longest first, with its share of the time without the queue."""
    whole = find_active_seconds(summary)
    ordered = sorted(((name, s) for name, s in summary.lost_seconds.items() if s), key=lambda item: -item[1])
    return [
        PhaseTime(name, seconds, seconds / whole if whole and name != "queue" else 0.0, _CAUSES.get(name, ""))
        for name, seconds in ordered
    ]


def build_phase_times(summary: RunSummary) -> list[PhaseTime]:
    """Return the phases of the whole run, longest first, and what is outside of them last."""
    wall = summary.wall_seconds or 0.0
    ordered = sort_phases(summary)
    covered = sum(seconds for _, seconds in ordered)
    whole = max(wall, covered) or 1.0
    found = [PhaseTime(name, seconds, seconds / whole, _MEANINGS.get(name, "")) for name, seconds in ordered]
    of_driver = min(find_active_seconds(summary) or wall, wall)
    outside = {
        "Pods": (wall - max(of_driver, covered), "scheduling, pulls of images, start and stop of Pods: no driver runs"),
        "other": (of_driver - covered, "time of the driver that no phase covers, and steps that were repeated"),
    }
    found += [PhaseTime(name, time, time / whole, meaning) for name, (time, meaning) in outside.items() if time > 0]
    return found


@dataclass(frozen=True)
class RewardTimes:
    """Times of the samples that were read. None: no result has the value."""

    name: str
    num_results: int
    num_valid: int
    mean_score: float | None
    """Mean of valid results."""
    latency_p50_seconds: float | None
    """From the end of a trajectory to the result."""
    latency_p95_seconds: float | None
    queue_p95_seconds: float | None
    """In the server, before the execution."""
    execute_mean_seconds: float | None


def summarize_rewards(samples: Iterable[SampleRow]) -> list[RewardTimes]:
    """Return one entry per reward, in order of appearance."""
    results: dict[str, list[ResultRow]] = {}
    for sample in samples:
        for result in sample.rewards:
            results.setdefault(result.name, []).append(result)
    return [_summarize(name, found) for name, found in results.items()]


def _summarize(name: str, results: Sequence[ResultRow]) -> RewardTimes:
    scores = list_known(result.score for result in results)
    latencies = list_known(result.latency_seconds for result in results)
    executions = list_known(result.execute_seconds for result in results)
    return RewardTimes(
        name=name,
        num_results=len(results),
        num_valid=sum(result.valid for result in results),
        mean_score=fmean(scores) if scores else None,
        latency_p50_seconds=_quantile(latencies, 0.5),
        latency_p95_seconds=_quantile(latencies, 0.95),
        queue_p95_seconds=_quantile(list_known(result.queue_seconds for result in results), 0.95),
        execute_mean_seconds=fmean(executions) if executions else None,
    )


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank quantile, as metrics.jsonl has it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else None


_MAX_MESSAGES = 5
_LITERAL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
"""What differs between messages of the same failure: quoted texts and numbers."""


@dataclass(frozen=True)
class Message:
    reward: str
    step: int
    text: str
    count: int
    """Samples with this message among those that were read, whatever its quoted texts and numbers."""


@dataclass(frozen=True)
class FailureReason:
    reason: str
    count: int
    """In all steps and evaluations."""
    first_step: int
    messages: tuple[Message, ...]
    """The first of each kind."""
    num_more: int
    """Further kinds."""


def summarize_failures(metrics: Metrics, samples: Iterable[SampleRow]) -> list[FailureReason]:
    """Return the reasons, most frequent first. `samples`: oldest first."""
    counts: Counter[str] = Counter()
    first_steps: dict[str, int] = {}
    counted = [(record.step, record.invalid_by_reason) for record in metrics.records]
    counted += [(record.step, record.scored_failures_by_reason) for record in metrics.steps]
    for step, by_reason in counted:
        for reason, count in by_reason.items():
            counts[reason] += count
            first_steps[reason] = min(step, first_steps.get(reason, step))
    seen: dict[str, dict[tuple[str, str], Message]] = {}
    for sample in samples:
        for result in sample.rewards:
            if result.reason:  # also of one that has a score by failurePolicy.scores
                text = result.message.strip()
                found = seen.setdefault(result.reason, {})
                kind = (result.name, _LITERAL.sub("", text))
                first = found.get(kind, Message(result.name, sample.step, text, 0))
                found[kind] = replace(first, count=first.count + 1)
    reasons = sorted({*counts, *seen}, key=lambda reason: (-counts[reason], reason))
    return [_describe(reason, counts[reason], first_steps, [*seen.get(reason, {}).values()]) for reason in reasons]


def _describe(reason: str, count: int, first_steps: dict[str, int], messages: Sequence[Message]) -> FailureReason:
    first = first_steps.get(reason, messages[0].step if messages else 0)
    count = count or sum(message.count for message in messages)
    return FailureReason(reason, count, first, tuple(messages[:_MAX_MESSAGES]), max(0, len(messages) - _MAX_MESSAGES))
