"""What a page learns of a run while it is open: new steps, who waits for whom, new samples. Pure.

Invariant: a cursor says all that its page has. So a page that reconnects, also to another server, loses nothing that is
still known, and gets nothing twice; if the run's history was cut, as by a restart from a checkpoint, it starts again.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rljob_api.run.metrics import EvaluationRecord, Metrics, StepRecord
from rljob_api.run.trajectories import SampleRow
from rljob_api.wire.driver_status import DriverStatus
from rljob_cli.report.collect import add_agent
from rljob_cli.report.samples import describe_sample
from rljob_cli.run.snapshot import describe_groups


class Cursor(NamedTuple):
    """What a page has: so many steps and evaluations, the last one ended at `time`, and samples of a feed."""

    num_steps: int = 0
    num_evaluations: int = 0
    time: int = 0
    """Milliseconds since 1970."""
    feed: str = "-"
    number: int = 0
    """The first sample of the feed that the page does not have."""

    def __str__(self) -> str:
        return ".".join(map(str, self))


def parse_cursor(text: str) -> Cursor:
    """Return the cursor of a page; the beginning, if it is none of ours."""
    parts = text.split(".")
    try:
        steps, evaluations, time, feed, number = parts
        return Cursor(int(steps), int(evaluations), int(time), feed, int(number))
    except ValueError:
        return Cursor()


class Event(NamedTuple):
    kind: str
    """records, restarted, samples or status."""
    data: dict[str, Any]

    def encode(self, cursor: Cursor) -> bytes:
        """Return the event as a server sends it; the browser sends the cursor back when it reconnects."""
        text = json.dumps(self.data, ensure_ascii=False)
        return f"event: {self.kind}\nid: {cursor}\ndata: {text}\n\n".encode()


def begin(metrics: Metrics) -> Cursor:
    """Return the cursor of a page that was rendered with these records."""
    return Cursor(len(metrics.steps), len(metrics.evaluations), _last_time(metrics.steps, metrics.evaluations))


def find_records(metrics: Metrics, cursor: Cursor) -> tuple[list[Event], Cursor]:
    """Return what the page does not have of metrics.jsonl."""
    steps, evaluations = metrics.steps[: cursor.num_steps], metrics.evaluations[: cursor.num_evaluations]
    is_same = (len(steps), len(evaluations)) == cursor[:2] and _last_time(steps, evaluations) == cursor.time
    new_steps = metrics.steps[cursor.num_steps if is_same else 0 :]
    new_evaluations = metrics.evaluations[cursor.num_evaluations if is_same else 0 :]
    if is_same and not (new_steps or new_evaluations):
        return [], cursor
    lines = [*map(_describe_step, new_steps), *map(_describe_evaluation, new_evaluations)]
    now = begin(metrics)._replace(feed=cursor.feed, number=cursor.number)
    return [Event("records" if is_same else "restarted", {"lines": lines})], now


def find_samples(feed: str, following: int, samples: Sequence[SampleRow], cursor: Cursor) -> tuple[list[Event], Cursor]:
    """Return the scored samples that the page does not have. `following`: the number after that of the last one."""
    first = following - len(samples)
    number = cursor.number if cursor.feed == feed else first
    if not feed or (cursor.feed == feed and number >= following):
        return [], cursor
    new = samples[max(0, number - first) :]
    data = {"samples": [describe_sample(add_agent(row)) for row in new], "lost": max(0, first - number)}
    return [Event("samples", data)] if new else [], cursor._replace(feed=feed, number=following)


def describe_status(status: DriverStatus | None) -> dict[str, Any]:
    """Return who waits for whom, as rows of role and text."""
    if status is None:
        return {"is_running": False, "rows": []}
    rows = [("steps", f"{status.step} of {status.total_steps} have ended")] if status.total_steps else []
    rows += [("driver", ": ".join(filter(None, [status.phase, status.waits_for])))]
    rows += [(part.role, f"{part.name} hangs for {part.seconds:.0f} s; {part.doing}") for part in status.hung]
    rows += [(each.what, f"is away for {each.seconds:.0f} s: {each.message}") for each in status.outages]
    schedule = status.schedule
    if known := describe_groups(schedule):
        rows.append(("groups", known))
    for name, demand in status.demand.items():
        text = f"{demand.in_flight} in flight, {demand.waiting} wait for a replica"
        oldest = f", the oldest for {demand.oldest_in_flight_seconds:.1f} s" if demand.in_flight else ""
        rows.append((f"requests of {name}", text + oldest))
    if busy := schedule.busy.describe():
        rows.append(("at work in the last step", busy))
    return {"is_running": True, "rows": rows}


def _last_time(steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> int:
    ends = [*(step.time or 0.0 for step in steps[-1:]), *(each.time or 0.0 for each in evaluations[-1:])]
    return int(1000 * max(ends, default=0.0))


def _describe_step(record: StepRecord) -> str:
    parts = [f"step {record.step}"]
    parts += [] if record.reward is None else [f"reward {record.reward:.3f}"]
    parts += [] if record.step_seconds is None else [f"{record.step_seconds:.1f} s"]
    return ", ".join([*parts, *([f"{record.num_invalid} invalid"] if record.num_invalid else [])])


def _describe_evaluation(record: EvaluationRecord) -> str:
    accuracy = "no accuracy" if record.accuracy is None else f"accuracy {record.accuracy:.3f}"
    return f"evaluation after step {record.step}, {accuracy}"
