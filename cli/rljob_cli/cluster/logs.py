"""logs: those of a job's Pods as one, each line behind the name of its Pod.

Past logs are merged by their times. Followed ones are merged as they come, one thread a Pod: each reads its log and
waits for the next line, until its container ends; the main thread prints, and looks every second for Pods and
containers that are new. Invariant: across a broken connection no line is printed twice.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from rljob_api.errors import UserError
from rljob_api.wire.contract import LABEL_JOB, LABEL_ROLE
from rljob_cli.cluster.client import Cluster, ClusterError, Manifest, NotFoundError, NotReadyError
from rljob_cli.cluster.formatting import describe_pod, name_job, role_of
from rljob_operator.plan.observed_job import container_statuses, name_of

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""SGR codes: the first six of a terminal's and their bright ones, without red, black and white."""
_LOOK_SECONDS = 1.0
_OVERLAP_SECONDS = 5
_MAX_WAITING_LINES = 10_000
_ROLES = ("head", "trainer", "rollout", "reward")


@dataclass(frozen=True)
class Selection:
    """Which logs, as the options say."""

    job: str
    role: str | None = None
    container: str | None = None
    """None: the one that does the role's work."""
    tail: int | None = None
    """Lines of each Pod."""
    previous: bool = False


class Line(NamedTuple):
    """One line, ordered by its time in UTC."""

    time: str
    pod: str
    text: str


class Printer:
    """Puts each Pod's name before its lines, in a colour of its own on a terminal."""

    def __init__(self, write: Callable[[str], object], colour: bool) -> None:
        self._write, self._colour = write, colour
        self._codes: dict[str, int] = {}
        self._width = 0

    def expect(self, pods: list[str]) -> None:
        """Widen the names' column before the first line comes."""
        self._width = max([self._width, *map(len, pods)])

    def print(self, line: Line) -> None:
        self.expect([line.pod])
        code = self._codes.setdefault(line.pod, _COLOURS[len(self._codes) % len(_COLOURS)])
        name = line.pod.ljust(self._width)
        self._write(f"\x1b[{code}m{name}\x1b[0m {line.text}\n" if self._colour else f"{name} {line.text}\n")


def make_printer() -> Printer:
    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    return Printer(write, sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


def find_pods(cluster: Cluster, selection: Selection) -> list[Manifest]:
    """The Pods of the roles that were asked for. UserError for a role that the job has not."""
    found = cluster.list_pods(f"{LABEL_JOB}={selection.job},{LABEL_ROLE} in ({', '.join(_ROLES)})")
    wanted = (pod for pod in found if _is_of(role_of(pod), selection.role))
    return sorted((pod for pod in wanted if selection.container in (None, *_container_names(pod))), key=name_of)


def check_role(job: Manifest, role: str | None) -> None:
    rewards = {f"reward-{reward['name']}": reward for reward in job["spec"].get("rewards") or []}
    if role in rewards and not {"function", "model", "judge"} & rewards[role].keys():
        reference = rewards[role].get("rewardModelRef")
        where = "runs at its url"
        if reference:
            where = (
                f"runs in RewardModel {reference['name']}: kubectl logs -l rljob.dev/reward-model={reference['name']}"
            )
        raise UserError(f"{name_job(job)}: {role} is served by no Pod of this job; it {where}")
    if role is not None and role not in (*_ROLES, *rewards):
        raise UserError(f"--role must be one of {', '.join([*_ROLES, *rewards])}, got {role}")


def _is_of(role: str, wanted: str | None) -> bool:
    return wanted in (None, role) or (wanted == "reward" and role.startswith("reward-"))


def container_of(pod: Manifest) -> str:
    """The container that does the role's work; it is named after the role."""
    names = [str(container["name"]) for container in pod["spec"]["containers"]]
    role = (pod["metadata"].get("labels") or {}).get(LABEL_ROLE)
    return role if role in names else names[0]


def _container_names(pod: Manifest) -> list[str]:
    spec = pod["spec"]
    return [str(container["name"]) for container in [*(spec.get("initContainers") or []), *spec["containers"]]]


def has_node(pod: Manifest) -> bool:
    """Of a Pod without one the API server says nothing at all."""
    return bool(pod["spec"].get("nodeName"))


def parse_line(pod: str, raw: str) -> Line:
    stamp, _, text = raw.partition(" ")
    return Line(_to_utc(stamp), pod, text)


def _to_utc(stamp: str) -> str:
    """2026-01-01T01:00:00.000000001+01:00 as 2026-01-01T00:00:00.000000001: kubelets write their nodes' zones."""
    if stamp.endswith("Z"):
        return stamp[:-1]
    try:
        # All digits of the second are kept as text: Python's times have no nanoseconds.
        moment, fraction = datetime.fromisoformat(stamp), stamp[19:].partition("+")[0].partition("-")[0]
    except ValueError:
        return stamp
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S") + fraction


def print_logs(cluster: Cluster, selection: Selection) -> int:
    """What there is, merged by time. 1 when no Pod has a log."""
    check_role(cluster.get_job(selection.job), selection.role)
    pods = find_pods(cluster, selection)
    streams = []
    for pod in pods:
        if not has_node(pod):
            print(f"{name_of(pod)}: has no log: {describe_pod(pod)}", file=sys.stderr)
            continue
        try:
            container = selection.container or container_of(pod)
            lines = cluster.open_log(name_of(pod), container, tail=selection.tail, previous=selection.previous)
        except (NotReadyError, NotFoundError) as error:
            print(f"{name_of(pod)}: {error}", file=sys.stderr)
            continue
        streams.append(_read(name_of(pod), lines))
    printer = make_printer()
    printer.expect([name_of(pod) for pod in pods])
    for line in heapq.merge(*streams):
        printer.print(line)
    if not pods:
        what = f"{selection.role} Pods" if selection.role else "Pods"
        what += f" with a container {selection.container}" if selection.container else ""
        print(f"the job has no {what} now; why: rljob explain {selection.job} -n {cluster.namespace}", file=sys.stderr)
    return 0 if streams else 1


def _read(pod: str, lines: Iterator[str]) -> Iterator[Line]:
    for raw in lines:
        yield parse_line(pod, raw)


class Instance(NamedTuple):
    """One run of a Pod's container: its log begins anew with each."""

    pod: str
    uid: str
    restarts: int


@dataclass
class Follower:
    """How far one container's log was read."""

    instance: Instance
    container: str
    tail: int | None
    thread: threading.Thread | None = None
    last_time: str = ""
    last_seen: float | None = None
    """When its newest line came; by time.monotonic."""
    is_over: bool = False
    waits: str = ""
    lines: queue.Queue[Line] = field(repr=False, default_factory=queue.Queue)

    def read(self, cluster: Cluster) -> None:
        """Until the stream ends. Only what is newer than the last line goes on."""
        since = None if self.last_seen is None else int(time.monotonic() - self.last_seen) + _OVERLAP_SECONDS
        tail = self.tail if since is None else None
        resumed_at = self.last_time
        try:
            opened = cluster.open_log(self.instance.pod, self.container, follow=True, tail=tail, since_seconds=since)
            self.waits = ""
            for raw in opened:
                line = parse_line(self.instance.pod, raw)
                if line.time > resumed_at:
                    self.last_time, self.last_seen = line.time, time.monotonic()
                    self.lines.put(line)
        except NotFoundError:
            self.is_over = True
        except ClusterError as error:
            self.waits = str(error)


class Followers:
    """The followers of all Pods that were ever seen."""

    def __init__(self, cluster: Cluster, selection: Selection) -> None:
        self._cluster, self._selection = cluster, selection
        self._known: dict[Instance, Follower] = {}
        self.lines: queue.Queue[Line] = queue.Queue(_MAX_WAITING_LINES)
        self._told: set[tuple[str, str]] = set()
        self._is_first = True

    def look(self) -> list[str]:
        """Follow what is new or whose connection has ended. Returns what to tell the user."""
        pods = find_pods(self._cluster, self._selection)
        waiting = {(name_of(pod), f"has no log yet: {describe_pod(pod)}") for pod in pods if not has_node(pod)}
        for pod in filter(has_node, pods):
            self._follow(pod)
        self._is_first = False
        waiting |= {(f.instance.pod, f.waits) for f in self._known.values() if f.waits}
        news = sorted(waiting - self._told)
        self._told |= waiting
        return [f"{pod}: {why}" for pod, why in news]

    def _follow(self, pod: Manifest) -> None:
        container = self._selection.container or container_of(pod)
        status = next((s for s in container_statuses(pod) if s["name"] == container), {})
        instance = Instance(name_of(pod), pod["metadata"]["uid"], int(status.get("restartCount", 0)))
        # Of a container that comes up while we watch, every line counts.
        tail = self._selection.tail if self._is_first else None
        follower = self._known.setdefault(instance, Follower(instance, container, tail, lines=self.lines))
        if follower.is_over or (follower.thread and follower.thread.is_alive()):
            return
        has_ended = "terminated" in (status.get("state") or {})
        was_read = follower.thread is not None and not follower.waits
        if has_ended and was_read and follower.last_seen is not None:
            follower.is_over = True
            return
        follower.thread = threading.Thread(target=follower.read, args=(self._cluster,), daemon=True)
        follower.thread.start()

    def are_reading(self) -> bool:
        return any(follower.thread and follower.thread.is_alive() for follower in self._known.values())


def follow_logs(cluster: Cluster, selection: Selection) -> int:
    """Until the job has ended and all is read, or until interrupted."""
    check_role(cluster.get_job(selection.job), selection.role)
    followers, printer = Followers(cluster, selection), make_printer()
    is_last = False
    while True:
        try:
            job = cluster.get_job(selection.job)
            is_last = (job.get("status") or {}).get("phase") in ("Succeeded", "Failed")
            news = followers.look()
        except UserError as error:  # it is deleted
            news, is_last = [str(error)], True
        except ClusterError as error:
            news = [f"{error}; trying again"]
        for text in news:
            print(text, file=sys.stderr, flush=True)
        num_printed = _print_for(_LOOK_SECONDS, followers, printer)
        if is_last and not num_printed and not followers.are_reading():
            return 0


def _print_for(seconds: float, followers: Followers, printer: Printer) -> int:
    deadline = time.monotonic() + seconds
    for count in itertools.count():
        try:
            printer.print(followers.lines.get(timeout=max(0.0, deadline - time.monotonic())))
        except queue.Empty:
            return count
        if time.monotonic() >= deadline:
            return count + 1
    raise AssertionError("count() has no end")
