"""The runs that a page lists: those that were named, and those in the folders that were named. Reads folders.

Invariant: an address names a run of the list, never a path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.run.folder import FILE_JOB, FILE_METRICS, TRAJECTORIES
from rljob_api.run.metrics import Metrics
from rljob_cli.report.collect import read_job, read_summary
from rljob_cli.report.page import RunLine
from rljob_cli.run.endpoint import Endpoint, read_endpoint
from rljob_cli.run.runfolder import MetricsReader
from rljob_cli.trajectories.index import LogIndex
from rljob_cli.trajectories.log import find_run, is_run
from rljob_cli.ui.head import Head

_UNFINISHED = "Unfinished"


class WatchedRun:
    """A run's folder, with what is kept between two reads."""

    def __init__(self, name: str, folder: Path, find_head: Callable[[], Endpoint | None] | None = None) -> None:
        """`find_head`: None, if the run is on this machine."""
        self.name, self.folder = name, folder
        self.index = LogIndex(folder / TRAJECTORIES)
        self.head = Head(find_head or (lambda: read_endpoint(folder)))
        self._metrics = MetricsReader(folder / FILE_METRICS)
        self._line: tuple[Metrics, RunLine] | None = None

    def read_metrics(self) -> Metrics:
        return self._metrics.read()

    def changed_at(self) -> float:
        """Return when its records or its job were written last, in seconds since 1970."""
        times = [path.stat().st_mtime for name in (FILE_JOB, FILE_METRICS) if (path := self.folder / name).exists()]
        return max(times, default=0.0)

    def describe(self) -> RunLine:
        """Return the run's line in the list. It is built again when a step has ended, and while the run is not over."""
        metrics = self.read_metrics()
        if self._line is None or self._line[0] is not metrics or self._line[1].phase == _UNFINISHED:
            self._line = metrics, _describe(self.name, self.folder, metrics)
        return self._line[1]


def _describe(name: str, folder: Path, metrics: Metrics) -> RunLine:
    job, _ = read_job(folder / FILE_JOB)
    summary = read_summary(folder, name, job, metrics)
    last = max((record.time or 0.0 for record in metrics.records), default=0.0)
    return RunLine(
        name=name,
        phase=summary.phase,
        step=metrics.last_step,
        total_steps=summary.total_steps,
        reward=metrics.steps[-1].reward if metrics.steps else None,
        accuracy=summary.accuracy_after,
        changed=datetime.fromtimestamp(last).astimezone().isoformat(" ", "seconds") if last else "",
    )


class RunList:
    """Invariant: a run keeps its name while the program runs; new runs of a folder are found at each read."""

    def __init__(self, arguments: Sequence[str], directory: Path) -> None:
        """Raise UserError if there is no run at all, or one that was named does not exist."""
        self._parents: list[Path] = []
        self._named: list[Path] = []
        for argument in arguments or [str(directory)]:
            folder = Path(argument)
            if folder.is_dir() and not is_run(folder) and (list_runs(folder) or not arguments):
                self._parents.append(folder)
            else:
                self._named.append(find_run(argument, directory))
        self._runs: dict[str, WatchedRun] = {}
        if not self.read():
            raise UserError(f"{directory}: no run has started here; pass a run, or a folder with runs")

    def read(self) -> dict[str, WatchedRun]:
        """Return the runs by name, those that were named first."""
        known = {run.folder for run in self._runs.values()}
        for folder in [*self._named, *(run for parent in self._parents for run in list_runs(parent))]:
            if folder.resolve() not in known:
                name = self._choose_name(folder.resolve())
                self._runs[name] = WatchedRun(name, folder.resolve())
                known.add(folder.resolve())
        return self._runs

    def _choose_name(self, folder: Path) -> str:
        name = folder.name if folder.name not in self._runs else f"{folder.parent.name}/{folder.name}"
        number = 2
        while name in self._runs:
            name, number = f"{folder.name}-{number}", number + 1
        return name


def list_runs(parent: Path) -> list[Path]:
    """Return the folders of runs in a folder, by name."""
    try:
        return sorted(folder for folder in parent.iterdir() if folder.is_dir() and _has_begun(folder))
    except OSError:
        return []


def _has_begun(folder: Path) -> bool:
    """Whether it is a run's folder; that of a log alone is one only if it is named."""
    return (folder / FILE_JOB).exists() or (folder / FILE_METRICS).exists()
