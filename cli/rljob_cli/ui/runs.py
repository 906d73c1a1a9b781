"""The runs that a page lists: those that were named, and those in the folders that were named. Reads folders.

Of a run in progress, asks the head for its status, and for the samples that it scored last. Invariant: an address names
a run of the list, never a path.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.run.folder import (
    FILE_DRIVER_SUMMARY,
    FILE_JOB,
    FILE_METRICS,
    FILE_SESSIONS,
    FILE_SUMMARY,
    TRAJECTORIES,
)
from rljob_api.run.metrics import Metrics
from rljob_api.run.origin import FILE_ORIGIN, find_changes, read_origin
from rljob_api.run.trajectories import RecentSamples, SampleRow
from rljob_api.wire.contract import UrlPath
from rljob_api.wire.driver_status import DriverStatus
from rljob_api.wire.redaction import Redactor, redact_job
from rljob_cli.report.collect import read_job, read_summary
from rljob_cli.report.page import RunLine, build_redactor
from rljob_cli.run.curves import Panel, build_panels
from rljob_cli.run.endpoint import Endpoint, read_endpoint
from rljob_cli.run.runfolder import MetricsReader, is_in_use
from rljob_cli.trajectories.index import FileState, LogIndex, read_state
from rljob_cli.trajectories.log import find_run, is_run

_TIMEOUT = aiohttp.ClientTimeout(total=5)
_BUSY_SECONDS = 60.0
"""A head that starts, or whose machine has too much to do, may answer late: so long it keeps its last status."""
_MAX_SAMPLES = 512
_MAX_SETTING = 40
"""Characters of a setting in the list of runs."""
_Answer = TypeVar("_Answer", DriverStatus, RecentSamples)


class Head:
    """What is known of a head. `status` is None while none answers."""

    def __init__(self, find: Callable[[], Endpoint | None]) -> None:
        self._find = find
        self.status: DriverStatus | None = None
        self.feed = ""
        """Id of the samples' numbers."""
        self.samples: deque[SampleRow] = deque(maxlen=_MAX_SAMPLES)
        self.next = 0
        """The number after that of the last sample."""
        self._answered_at = 0.0

    async def refresh(self, session: aiohttp.ClientSession) -> None:
        try:
            await self._ask(session)
        except TimeoutError:
            if time.monotonic() > self._answered_at + _BUSY_SECONDS:
                self.status = None

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        endpoint = self._find()
        self.status = await _get(session, endpoint, UrlPath.STATUS, DriverStatus)
        if self.status is None:
            return
        self._answered_at = time.monotonic()
        found = await _get(session, endpoint, f"{UrlPath.SAMPLES}?after={self.next}", RecentSamples)
        if found is not None and found.feed != self.feed:  # another head: its numbers begin again
            self.samples.clear()
            self.feed = found.feed
            found = await _get(session, endpoint, f"{UrlPath.SAMPLES}?after=0", RecentSamples)
        if found is not None and found.feed == self.feed:
            self.samples.extend(found.samples)
            self.next = found.next


async def _get(
    session: aiohttp.ClientSession, endpoint: Endpoint | None, path: str, kind: type[_Answer]
) -> _Answer | None:
    """Return None if nothing answers, or its version differs too much. Raise TimeoutError if the answer is late."""
    if endpoint is None:
        return None
    headers = {"Authorization": f"Bearer {endpoint.token}"}
    try:
        async with session.get(endpoint.url + path, headers=headers, timeout=_TIMEOUT) as response:
            return kind.model_validate_json(await response.read()) if response.status == 200 else None
    except TimeoutError:
        raise
    except (aiohttp.ClientError, OSError, ValidationError):
        return None


_DESCRIBED = (FILE_JOB, FILE_METRICS, FILE_SUMMARY, FILE_DRIVER_SUMMARY, FILE_SESSIONS)
"""What the line of a run follows from."""
_State = tuple[FileState, ...]


class WatchedRun:
    """A run's folder, with what is kept between two reads."""

    def __init__(self, name: str, folder: Path, find_head: Callable[[], Endpoint | None] | None = None) -> None:
        """`find_head`: None, if the run is on this machine."""
        self.name, self.folder = name, folder
        self.index = LogIndex(folder / TRAJECTORIES)
        self.head = Head(find_head or (lambda: read_endpoint(folder)))
        self._metrics = MetricsReader(folder / FILE_METRICS)
        self._line: tuple[tuple[_State, bool, bool], RunLine] | None = None
        self._redactor: tuple[_State, Redactor] | None = None
        self._settings: tuple[_State, dict[str, Any]] | None = None
        self._panels: dict[tuple[float | None, ...], list[Panel]] = {}

    def read_metrics(self) -> Metrics:
        return self._metrics.read()

    def build_panels(self, num_steps: int | None = None, num_evaluations: int | None = None) -> list[Panel]:
        """Return the panels of the first steps and evaluations; None: of the whole run. Those that were asked for last
        are kept: they are the same for all pages, until a step ends."""
        metrics = self.read_metrics()
        metrics = Metrics(metrics.steps[:num_steps], metrics.evaluations[:num_evaluations])
        ends = (records[-1].time for records in (metrics.steps, metrics.evaluations) if records)
        key = (len(metrics.steps), len(metrics.evaluations), *ends)
        if key not in self._panels:
            self._panels = dict(list(self._panels.items())[-1:]) | {key: build_panels(metrics)}
        return self._panels[key]

    def settings(self) -> dict[str, Any]:
        """Return what may differ between runs: the spec without secrets, and digests of the files that it names."""
        state = self._read_state(FILE_JOB, FILE_ORIGIN)
        if self._settings is None or self._settings[0] != state:
            job, _ = read_job(self.folder / FILE_JOB)
            try:
                origin = read_origin(self.folder)
            except (OSError, ValueError):
                origin = None
            found = {} if job is None else redact_job(job)["spec"]
            self._settings = state, found | ({"content of": origin.contents} if origin else {})
        return self._settings[1]

    def changed_at(self) -> float:
        """Return when its records or its job were written last, in seconds since 1970."""
        states = filter(None, self._read_state(FILE_JOB, FILE_METRICS))
        return max((modified for _, modified in states), default=0) / 1e9

    def describe(self) -> RunLine:
        """Return the run's line in the list. It is built again when something that it follows from has changed."""
        state = self._read_state(*_DESCRIBED), is_in_use(self.folder), self.answers
        if self._line is None or self._line[0] != state:
            self._line = state, describe(self.name, self.folder, self.read_metrics(), answers=self.answers)
        return self._line[1]

    @property
    def answers(self) -> bool:
        """Whether its head answered when it was asked last."""
        return self.head.status is not None

    def redactor(self) -> Redactor:
        """Return what hides the secrets of the run's job."""
        state = self._read_state(FILE_JOB)
        if self._redactor is None or self._redactor[0] != state:
            self._redactor = state, build_redactor(read_job(self.folder / FILE_JOB)[0])
        return self._redactor[1]

    def _read_state(self, *names: str) -> _State:
        return tuple(read_state(self.folder / name) for name in names)


def describe(name: str, folder: Path, metrics: Metrics, *, answers: bool = False) -> RunLine:
    job, _ = read_job(folder / FILE_JOB)
    summary = read_summary(folder, name, job, metrics, answers=answers)
    last = max((record.time or 0.0 for record in metrics.records), default=0.0)
    return RunLine(
        name=name,
        phase=summary.phase,
        step=metrics.last_step,
        total_steps=summary.total_steps,
        reward=metrics.steps[-1].reward if metrics.steps else None,
        accuracy=summary.accuracy_after,
        changed=datetime.fromtimestamp(last).astimezone() if last else None,
    )


def find_differences(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return by run the settings that not all runs have alike."""
    first = next(iter(runs.values()), {})
    changes = {name: {each.path: each for each in find_changes(first, own)} for name, own in runs.items()}
    texts = {each.path: each.text_before for own in changes.values() for each in own.values()}
    return {
        name: ", ".join(
            f"{path} {_shorten(own[path].text_now if path in own else text)}" for path, text in texts.items()
        )
        for name, own in changes.items()
    }


def _shorten(text: str) -> str:
    """A long value, such as the source of a function, is shown by its digest."""
    return text if len(text) <= _MAX_SETTING else f"{text[:8]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


class RunList:
    """Invariant: a run keeps its name while the program runs; new runs of a folder are found at each read, and those
    whose folder is gone are not listed."""

    def __init__(self, arguments: Sequence[str], directory: Path) -> None:
        """Raise UserError if there is no run at all, or one that was named does not exist."""
        self._parents: list[Path] = []
        self._named: list[Path] = []
        if not arguments:
            (self._named if is_run(directory) else self._parents).append(directory)
        for argument in arguments:
            folder = Path(argument)
            if folder.is_dir() and not is_run(folder) and list_runs(folder):
                self._parents.append(folder)
            else:
                self._named.append(_require_run(find_run(argument, directory)))
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
        return {name: run for name, run in self._runs.items() if run.folder.is_dir()}

    def _choose_name(self, folder: Path) -> str:
        name = folder.name if folder.name not in self._runs else f"{folder.parent.name}/{folder.name}"
        number = 2
        while name in self._runs:
            name, number = f"{folder.name}-{number}", number + 1
        return name


def _require_run(folder: Path) -> Path:
    """Raise UserError if the folder is not that of a run."""
    if not (is_run(folder) or _has_begun(folder)):
        raise UserError(f"{folder}: no run has started here; pass a run, or a folder with runs")
    return folder


def list_runs(parent: Path) -> list[Path]:
    """Return the folders of runs in a folder, by name."""
    try:
        return sorted(folder for folder in parent.iterdir() if folder.is_dir() and _has_begun(folder))
    except OSError:
        return []


def _has_begun(folder: Path) -> bool:
    """Whether it is a run's folder; that of a log alone is one only if it is named."""
    return (folder / FILE_JOB).exists() or (folder / FILE_METRICS).exists()
