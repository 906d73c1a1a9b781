"""The tables of `rljob top`, coloured by what is wrong. Decides which columns a narrow terminal does without."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from rljob_cli.cluster.formatting import Health
from rljob_cli.cluster.top import JobRow, JobView, PodRow
from rljob_cli.run.reward_rows import HEADER, row_cells
from rljob_cli.tables import Column, build_table
from rljob_cli.terminal import clean

_COLOURS: dict[Health, str] = {"ok": "green", "waiting": "yellow", "broken": "red"}
_PHASE_COLOURS = {"Running": "green", "Succeeded": "green", "Failed": "red"}
_WAITING = "yellow"
_JOB_COLUMNS = [
    Column("NAME"),
    Column("PHASE"),
    Column("STEP"),
    Column("LAST STEP", drop=3),
    Column("REWARD", drop=1),
    Column("ROLLOUTS", drop=5),
    Column("REWARDS", drop=4),
    Column("DRIVER", drop=7),
    Column("STALENESS", drop=8),
    Column("AGE", drop=2),
]
_WAITS = Column("WAITS FOR", drop=-1, is_text=True)
_SCHEDULE_COLUMNS = [
    Column("SCHEDULE"),
    Column("STALENESS", drop=1),
    Column("IN FLIGHT", drop=2),
    Column("SCORED", drop=3),
    Column("DUE", drop=4),
    Column("PREFIX HITS", drop=5),
    Column("BUSY IN THE LAST STEP", is_text=True),
]
_SERVICE_DROPS = {"KIND": 3, "WANT": 5, "GIVEN": 2, "QUEUE": 1, "AGE": 4, "P50": 6}
_SERVICE_COLUMNS = [
    Column("SERVICE", is_text=True),
    *(Column(name, drop=_SERVICE_DROPS.get(name, 0)) for name in HEADER[1:-1]),
    Column("INVALID", is_text=True),
]
_POD_COLUMNS = [
    Column("POD"),
    Column("ROLE", drop=3),
    Column("NODE", drop=4),
    Column("RESTARTS", drop=1),
]
_MEASURED_COLUMNS = [Column("CPU", drop=6), Column("MEMORY", drop=5)]
_POD_END = [Column("AGE", drop=2), Column("STATE", is_text=True)]


def draw_jobs(rows: list[JobRow], namespace: str, everywhere: bool) -> RenderableType:
    if not rows:
        return Text(f"no RLJobs in {'any namespace' if everywhere else f'namespace {namespace} (-A: all namespaces)'}")
    header, cells = [*_JOB_COLUMNS, _WAITS], [[*_job_cells(row), row.waits_for] for row in rows]
    if everywhere:
        header = [Column("NAMESPACE", is_text=True), *header]
        cells = [[row.namespace, *line] for row, line in zip(rows, cells, strict=True)]
    return build_table(header, cells)


def _job_cells(row: JobRow) -> list[str | Text]:
    phase = Text(row.phase, _PHASE_COLOURS.get(row.phase, _WAITING))
    step = f"{row.step}/{row.total_steps}" if row.total_steps else "-"
    reward = "-" if row.reward is None else f"{row.reward:.3f}"
    counts = (row.rollouts or "-", row.rewards or "-", row.driver_phase or "-", _number(row.schedule, "staleness"))
    return [row.name, phase, step, row.last_step_age, reward, *counts, row.age]


def _number(schedule: dict[str, Any] | None, name: str) -> str:
    value = schedule[name] if schedule else None
    return "-" if value is None else str(value)


def draw_job(view: JobView) -> RenderableType:
    """One job. What it waits for has lines of its own, so that it is never cut."""
    tables: list[RenderableType] = [build_table(_JOB_COLUMNS, [_job_cells(view.job)])]
    if view.job.waits_for:
        tables.append(Text(f"waits for: {clean(view.job.waits_for)}", _WAITING))
    if schedule := view.job.schedule:
        numbers = ("staleness", "groups_in_flight", "groups_scored", "groups_due", "prefix_hits")
        cells = [schedule["type"] or "-", *(_number(schedule, name) for name in numbers), schedule["busy"] or "-"]
        tables += ["", build_table(_SCHEDULE_COLUMNS, [cells])]
    if view.roles:
        tables += ["", build_table(["ROLE", "READY", "RESTARTS"], [_role_cells(role) for role in view.roles])]
    if view.rewards:
        tables += ["", build_table(_SERVICE_COLUMNS, [row_cells(row) for row in view.rewards], gap=2)]
    if view.pods:
        is_measured = any(pod.cpu_cores is not None for pod in view.pods)
        columns = [*_POD_COLUMNS, *(_MEASURED_COLUMNS if is_measured else []), *_POD_END]
        tables += ["", build_table(columns, [_pod_cells(pod, is_measured) for pod in view.pods])]
    return Group(*tables)


def _role_cells(role: dict[str, Any]) -> list[str | Text]:
    colour = _COLOURS["ok" if role["ready"] >= role["desired"] else "waiting"]
    return [role["name"], Text(f"{role['ready']}/{role['desired']}", colour), str(role["restarts"])]


def _pod_cells(pod: PodRow, is_measured: bool) -> list[str | Text]:
    measured = []
    if is_measured:
        measured.append("-" if pod.cpu_cores is None else f"{pod.cpu_cores:.2f}")
        measured.append("-" if pod.memory_bytes is None else f"{pod.memory_bytes / 2**20:.0f}Mi")
    state = Text(clean(pod.state), _COLOURS[pod.health])
    return [pod.name, pod.role, pod.node or "-", str(pod.restarts), *measured, pod.age, state]
