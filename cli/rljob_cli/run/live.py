"""Outputs of a run: plain lines, JSON lines, or a live view for a terminal. Each shows snapshots."""

import json
from collections import deque
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rljob_api.wire.driver_status import ScheduleStatus
from rljob_cli.run.reward_rows import HEADER, row_cells
from rljob_cli.run.snapshot import FINAL_PHASES, Change, Snapshot, describe_groups, describe_work, diff_snapshots
from rljob_cli.run.summary import describe_uncounted, group_by_set
from rljob_cli.tables import build_table, print_lines_on

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_NUM_RECENT = 6
_SILENT_SECONDS = 20.0
"""Without a line for so long, the plain output says what the run does."""


class PlainOutput:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = Snapshot()
        self._reported_at = 0.0
        """In seconds of the run, of the last line."""

    def begin(self, earlier: Snapshot) -> None:
        """Take the steps of the sessions before this one as shown."""
        self._last = earlier

    def show(self, snapshot: Snapshot) -> None:
        changes = diff_snapshots(self._last, snapshot)
        if any(change.text for change in changes):
            self._reported_at = snapshot.elapsed_seconds
        elif snapshot.elapsed_seconds - self._reported_at >= _SILENT_SECONDS:
            self._reported_at = snapshot.elapsed_seconds
            changes = [*changes, *describe_work(snapshot)]
        for change in changes:
            self._report(change, snapshot)
        self._last = snapshot

    def _report(self, change: Change, snapshot: Snapshot) -> None:
        if change.text:
            self.say(f"[{format_seconds(snapshot.elapsed_seconds):>6}] {change.text}")

    def say(self, text: str) -> None:
        print_lines_on(self._console)(text)

    def close(self) -> None:
        pass


class JsonOutput(PlainOutput):
    def _report(self, change: Change, snapshot: Snapshot) -> None:
        print(json.dumps({"elapsed_seconds": round(snapshot.elapsed_seconds, 1), **change.data}), flush=True)

    def say(self, text: str) -> None:
        print(json.dumps({"type": "message", "message": text}), flush=True)


class LiveOutput(PlainOutput):
    """A view that is updated in place; failures and warnings scroll above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._recent: deque[str] = deque(maxlen=_NUM_RECENT)
        self._live = Live(Text("starting"), console=console)
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        self._live.update(render(snapshot, self._recent))

    def _report(self, change: Change, snapshot: Snapshot) -> None:
        if change.is_urgent:
            super()._report(change, snapshot)
        elif change.text and change.data["type"] not in ("step", "eval", "work"):
            self._recent.append(f"{format_seconds(snapshot.elapsed_seconds)}  {change.text}")

    def close(self) -> None:
        self._live.stop()


def make_output(kind: str, console: Console) -> PlainOutput:
    if kind == "json":
        return JsonOutput(console)
    return LiveOutput(console) if kind == "live" and console.is_terminal else PlainOutput(console)


def render(snapshot: Snapshot, recent: Iterable[str]) -> RenderableType:
    eta = snapshot.eta_seconds
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(snapshot.name, style="bold"),
        Text(snapshot.phase or "starting", style="green" if snapshot.phase == "Running" else "yellow"),
        Text(f"step {snapshot.step}/{snapshot.total_steps}"),
        ProgressBar(total=max(1, snapshot.total_steps), completed=snapshot.step, width=30),
        Text(format_seconds(snapshot.elapsed_seconds) + (f", {format_seconds(eta)} left" if eta else "")),
    )
    lines: list[RenderableType] = [head, _render_numbers(snapshot), _render_roles(snapshot)]
    if snapshot.rewards:
        cells = [row_cells(row) for row in snapshot.rewards]
        lines.append(build_table(HEADER, cells, gap=1, header_style="dim"))
    phase = snapshot.driver.phase if snapshot.driver else "" if snapshot.phase in FINAL_PHASES else "waiting for Pods"
    lines.append(Text(": ".join(filter(None, [phase, snapshot.waits_for])), style="cyan"))
    lines += [Text(line, style="dim", overflow="ellipsis", no_wrap=True) for line in recent]
    return Group(*lines)


def _render_numbers(snapshot: Snapshot) -> RenderableType:
    table, driver = Table.grid(padding=(0, 2)), snapshot.driver
    if rewards := [record.reward for record in snapshot.steps if record.reward is not None]:
        table.add_row("reward", f"{rewards[-1]:.3f}", sparkline(rewards))
    for name, records in group_by_set(snapshot.evals).items():
        accuracies = [record.accuracy for record in records if record.accuracy is not None]
        if accuracies:
            counts = describe_uncounted(records[-1])
            shown = " -> ".join(f"{value:.3f}" for value in dict.fromkeys((accuracies[0], accuracies[-1])))
            held_out = "held out" if name == records[-1].type else f"held out: {name}"
            table.add_row("accuracy", shown, "; ".join(filter(None, [held_out, counts])))
    if driver and driver.best_step is not None:
        table.add_row(
            "best step", str(driver.best_step), "" if driver.best_value is None else f"{driver.best_value:.3f}"
        )
    if driver and driver.tokens_per_second is not None:
        table.add_row("tokens/s", f"{driver.tokens_per_second:.0f}", "")
    if driver and driver.reward_latency_p50_seconds is not None:
        p95 = driver.reward_latency_p95_seconds or 0.0
        latency = f"p50 {1000 * driver.reward_latency_p50_seconds:.0f} ms, p95 {1000 * p95:.0f} ms"
        table.add_row("reward latency", latency, f"{driver.num_invalid} invalid")
    if driver and driver.schedule.type:
        table.add_row("schedule", driver.schedule.type, describe_schedule(driver.schedule))
    if driver and (busy := driver.schedule.busy.describe()):
        table.add_row("busy", "", busy)
    if driver and driver.schedule.prefix_hits is not None:
        table.add_row("prefix hits", f"{driver.schedule.prefix_hits:.0%}", "requests to rollouts with a cached prompt")
    if driver and driver.learning.is_learning is False:
        table.add_row("learning", Text("no", style="yellow"), driver.learning.message)
    return table


def describe_schedule(schedule: ScheduleStatus) -> str:
    """Return staleness and groups, as far as they are known."""
    parts = []
    if schedule.staleness is not None:
        bound = f" of {schedule.max_staleness}" if schedule.max_staleness else ""
        parts.append(f"staleness {schedule.staleness}{bound}")
    if known := describe_groups(schedule):
        parts.append(f"groups: {known}")
    return "; ".join(parts)


def _render_roles(snapshot: Snapshot) -> RenderableType:
    rows = [
        (r.name, Text(f"{r.ready}/{r.desired}", "green" if r.ready >= r.desired else "yellow"), str(r.restarts or ""))
        for r in snapshot.roles
    ]
    return build_table(("role", "ready", "restarts"), rows, gap=1, header_style="dim")


def sparkline(values: list[float]) -> str:
    """Draw the last values as one line of bars, scaled from minimum to maximum."""
    shown = values[-_SPARK_WIDTH:]
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def format_seconds(seconds: float) -> str:
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds_left:02}s" if minutes else f"{seconds_left}s"
