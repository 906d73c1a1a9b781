"""`rljob logs`: the logs of a job's Pods as one stream, each line behind the name of its Pod.

Past logs are merged by time. Followed logs are printed as they arrive, with one task per container.
Invariant: across a broken connection no line is printed twice.
"""

import asyncio
import functools
import heapq
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from rich.style import Style

from rljob_api.errors import UserError
from rljob_api.wire.contract import LABEL_JOB, LABEL_REWARD_MODEL, LABEL_ROLE
from rljob_cli.cluster.client import Cluster, ClusterError, NotFoundError, NotReadyError
from rljob_cli.cluster.control import ROLLOUTS_IN_TRAINER, find_agent_roles, shares_trainer
from rljob_cli.cluster.formatting import describe_pod, format_job_name
from rljob_cli.manifests import containers_of, labels_of, role_of
from rljob_cli.output import say
from rljob_cli.run.runfolder import is_in_use
from rljob_cli.tables import make_console
from rljob_cli.terminal import clean_colours, clean_lines, find_raw
from rljob_core.backend import Manifest
from rljob_core.children.common import AGENT, SERVING
from rljob_core.plan.observed_job import container_statuses, name_of

_POLL_SECONDS = 1.0
_OVERLAP_SECONDS = 5
_MAX_WAITING_LINES = 10_000
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue")
_STYLES = [Style.parse(f"{prefix}{colour}") for prefix in ("", "bright_") for colour in _COLOURS]
"""Without red, black and white."""
_ROLES = ("head", "trainer", "rollout", *SERVING)


@dataclass(frozen=True)
class Selection:
    job: str
    role: str | None = None
    container: str | None = None
    """None: the container that is named after the role."""
    tail: int | None = None
    """Lines of each Pod."""
    previous: bool = False


class Line(NamedTuple):
    """One line, ordered by its time in UTC."""

    time: str
    pod: str
    text: str


class Printer:
    """Prints lines behind their Pod's name, in a colour per Pod on a terminal."""

    def __init__(self, write: Callable[[str], object], colour: bool) -> None:
        self._write, self._colour = write, colour
        self._styles: dict[str, Style] = {}
        self._width = 0

    def widen(self, pods: list[str]) -> None:
        self._width = max([self._width, *map(len, pods)])

    def print(self, line: Line) -> None:
        self.widen([line.pod])
        style = self._styles.setdefault(line.pod, _STYLES[len(self._styles) % len(_STYLES)])
        name = line.pod.ljust(self._width)
        text = clean_colours(line.text) if self._colour else clean_lines(line.text)
        self._write(f"{style.render(name) if self._colour else name} {text}\n")


def make_printer() -> Printer:
    console = make_console()
    write = functools.partial(print, end="", file=find_raw(sys.stdout), flush=True)
    return Printer(write, console.is_terminal and not console.no_color)


async def find_pods(cluster: Cluster, selection: Selection) -> list[Manifest]:
    found = await cluster.list_pods(f"{LABEL_JOB}={selection.job},{LABEL_ROLE} in ({', '.join(_ROLES)})")
    return sorted((pod for pod in found if _is_selected(pod, selection)), key=name_of)


def _is_selected(pod: Manifest, selection: Selection) -> bool:
    role, spec = role_of(pod), pod["spec"]
    containers = [container["name"] for container in containers_of(spec)]
    has_role = selection.role in (None, role) or (selection.role in SERVING and role.startswith(f"{selection.role}-"))
    return has_role and selection.container in (None, *containers)


def check_role(job: Manifest, role: str | None) -> None:
    """Raise UserError if the job has no such role, or none of its Pods serves the reward."""
    rewards = {f"reward-{reward['name']}": reward for reward in job["spec"].get("rewards") or []}
    if role in rewards and not {"function", "model", "judge", "teacher"} & rewards[role].keys():
        reference = rewards[role].get("rewardModelRef")
        model = reference and reference["name"]
        where = "runs at its url"
        if model:
            where = f"runs in RewardModel {model}: kubectl logs -l {LABEL_REWARD_MODEL}={model}"
        raise UserError(f"{format_job_name(job)}: {role} is not served by a Pod of this job; it {where}")
    if role == "rollout" and shares_trainer(job):
        raise UserError(f"{format_job_name(job)}: {ROLLOUTS_IN_TRAINER}, and log there: --role trainer")
    agents = find_agent_roles(job)
    known = [each for each in _ROLES if each != AGENT or agents] + [*rewards, *agents]
    if role is not None and role not in known:
        raise UserError(f"--role must be one of {', '.join(known)}, got {role}")


def container_of(pod: Manifest) -> str:
    names = [str(container["name"]) for container in pod["spec"]["containers"]]
    role = labels_of(pod).get(LABEL_ROLE)
    return role if role in names else names[0]


def has_node(pod: Manifest) -> bool:
    """The API server has no log of a Pod without a node."""
    return bool(pod["spec"].get("nodeName"))


def parse_line(pod: str, raw: str) -> Line:
    stamp, _, text = raw.partition(" ")
    return Line(_to_utc(stamp), pod, text)


def _to_utc(stamp: str) -> str:
    """2026-01-01T01:00:00.000000001+01:00 as 2026-01-01T00:00:00.000000001: kubelets write their node's time zone."""
    if stamp.endswith("Z"):
        return stamp[:-1]
    try:
        # The digits of the second stay text, because Python's times have no nanoseconds.
        moment, fraction = datetime.fromisoformat(stamp), stamp[19:].partition("+")[0].partition("-")[0]
    except ValueError:
        return stamp
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S") + fraction


def print_run(folder: Path, files: str, tail: int | None, *, follow: bool) -> int:
    """Print the logs of a run's folder that a pattern matches, and with `follow` what is added until the run ends."""
    printer, known = make_printer(), dict[Path, int]()
    while True:
        is_last = not follow or not is_in_use(folder)
        for file in sorted((folder / "logs").glob(files)):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            first = known.get(file, 0 if tail is None else max(0, len(lines) - tail))
            for line in lines[first:]:
                printer.print(Line("", file.stem, line))
            known[file] = len(lines)
        if is_last:
            return 0
        time.sleep(_POLL_SECONDS)


async def print_logs(cluster: Cluster, selection: Selection) -> int:
    """Print the existing logs, merged by time. Return 1 if no Pod has a log."""
    check_role(await cluster.get_job(selection.job), selection.role)
    pods = await find_pods(cluster, selection)
    printer = make_printer()
    printer.widen([name_of(pod) for pod in pods])
    streams = []
    for pod in pods:
        if not has_node(pod):
            say(f"{name_of(pod)}: has no log: {describe_pod(pod)}")
            continue
        container = selection.container or container_of(pod)
        raw = cluster.stream_log(name_of(pod), container, tail=selection.tail, previous=selection.previous)
        lines = _parse(name_of(pod), raw)
        try:
            streams.append((await anext(lines, None), lines))
        except (NotReadyError, NotFoundError) as error:
            say(f"{name_of(pod)}: {error}")
    async for line in _merge(streams):
        printer.print(line)
    if not pods:
        what = f"{selection.role} Pods" if selection.role else "Pods"
        what += f" with a container {selection.container}" if selection.container else ""
        explain = f"rljob explain {selection.job} -n {cluster.namespace}"
        say(f"no {what} found; run `{explain}` to see why")
    return 0 if streams else 1


async def _parse(pod: str, lines: AsyncIterator[str]) -> AsyncIterator[Line]:
    async for raw in lines:
        yield parse_line(pod, raw)


async def _merge(streams: Sequence[tuple[Line | None, AsyncIterator[Line]]]) -> AsyncIterator[Line]:
    """Like heapq.merge. Each stream comes with its first line; None: it is empty."""
    heap = [(line, index) for index, (line, _) in enumerate(streams) if line is not None]
    heapq.heapify(heap)
    while heap:
        line, index = heap[0]
        yield line
        following = await anext(streams[index][1], None)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (following, index))


class Instance(NamedTuple):
    """One run of a Pod's container: each has its own log."""

    pod: str
    uid: str
    restarts: int


@dataclass
class Follower:
    """How far one container's log was read."""

    instance: Instance
    container: str
    tail: int | None
    lines: asyncio.Queue[Line] = field(repr=False, default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None
    last_time: str = ""
    last_seen: float | None = None
    """When its newest line arrived; by time.monotonic."""
    is_over: bool = False
    waiting_reason: str = ""

    @property
    def is_reading(self) -> bool:
        return self.task is not None and not self.task.done()

    async def read(self, cluster: Cluster) -> None:
        """Read until the stream ends, skipping lines that were read before."""
        since = None if self.last_seen is None else int(time.monotonic() - self.last_seen) + _OVERLAP_SECONDS
        tail = self.tail if since is None else None
        resumed_at, pod = self.last_time, self.instance.pod
        self.waiting_reason = ""
        try:
            async for raw in cluster.stream_log(pod, self.container, follow=True, tail=tail, since_seconds=since):
                line = parse_line(pod, raw)
                if line.time > resumed_at:
                    self.last_time, self.last_seen = line.time, time.monotonic()
                    await self.lines.put(line)
        except NotFoundError:
            self.is_over = True
        except ClusterError as error:
            self.waiting_reason = str(error)


class Followers:
    def __init__(self, cluster: Cluster, selection: Selection) -> None:
        self._cluster, self._selection = cluster, selection
        self._known: dict[Instance, Follower] = {}
        self.lines: asyncio.Queue[Line] = asyncio.Queue(_MAX_WAITING_LINES)
        self._reported: set[tuple[str, str]] = set()
        self._is_first = True

    async def poll(self) -> list[str]:
        """Follow new containers and those whose connection has ended. Return messages for the user."""
        pods = await find_pods(self._cluster, self._selection)
        waiting = {(name_of(pod), f"has no log yet: {describe_pod(pod)}") for pod in pods if not has_node(pod)}
        for pod in filter(has_node, pods):
            self._follow(pod)
        self._is_first = False
        waiting |= {(f.instance.pod, f.waiting_reason) for f in self._known.values() if f.waiting_reason}
        new = sorted(waiting - self._reported)
        self._reported |= waiting
        return [f"{pod}: {reason}" for pod, reason in new]

    def _follow(self, pod: Manifest) -> None:
        container = self._selection.container or container_of(pod)
        status = next((s for s in container_statuses(pod) if s["name"] == container), {})
        instance = Instance(name_of(pod), pod["metadata"]["uid"], int(status.get("restartCount", 0)))
        # All lines of a container that starts later are wanted.
        tail = self._selection.tail if self._is_first else None
        follower = self._known.setdefault(instance, Follower(instance, container, tail, self.lines))
        if follower.is_over or follower.is_reading:
            return
        has_ended = "terminated" in (status.get("state") or {})
        was_read = follower.task is not None and not follower.waiting_reason
        if has_ended and was_read and follower.last_seen is not None:
            follower.is_over = True
            return
        follower.task = asyncio.create_task(follower.read(self._cluster))

    def are_reading(self) -> bool:
        return any(follower.is_reading for follower in self._known.values())


async def follow_logs(cluster: Cluster, selection: Selection) -> int:
    """Follow until the job has ended and everything is read, or until interrupted."""
    check_role(await cluster.get_job(selection.job), selection.role)
    followers, printer = Followers(cluster, selection), make_printer()
    is_last = False
    while True:
        try:
            job = await cluster.get_job(selection.job)
            is_last = (job.get("status") or {}).get("phase") in ("Succeeded", "Failed")
            messages = await followers.poll()
        except UserError as error:  # the job was deleted
            messages, is_last = [str(error)], True
        except ClusterError as error:
            messages = [f"{error}; retrying"]
        for message in messages:
            say(message)
        num_printed = await _print_for(_POLL_SECONDS, followers.lines, printer)
        if is_last and not num_printed and not followers.are_reading():
            return 0


async def _print_for(seconds: float, lines: asyncio.Queue[Line], printer: Printer) -> int:
    num_printed = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                printer.print(await lines.get())
                num_printed += 1
    except TimeoutError:
        return num_printed
