"""`rljob logs`: the logs of a job's Pods as one stream, each line behind the name of its Pod.

Past logs are merged by time. Followed logs are printed as they arrive: one task per container reads its log until it
ends, and the main task prints and polls for new Pods and containers. Invariant: across a broken connection no line is
printed twice.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rljob_api.errors import UserError
from rljob_cli.cluster.client import Cluster, ClusterError, NotFoundError, NotReadyError
from rljob_cli.cluster.formatting import describe_pod
from rljob_cli.cluster.log_lines import (
    Line,
    Printer,
    Selection,
    check_role,
    container_of,
    find_pods,
    has_node,
    make_printer,
    parse_line,
)
from rljob_operator.backend import Manifest
from rljob_operator.plan.observed_job import container_statuses, name_of

_POLL_SECONDS = 1.0
_OVERLAP_SECONDS = 5
_MAX_WAITING_LINES = 10_000


async def print_logs(cluster: Cluster, selection: Selection) -> int:
    """Print the existing logs, merged by time. Return 1 if no Pod has a log."""
    check_role(await cluster.get_job(selection.job), selection.role)
    pods = await find_pods(cluster, selection)
    printer = make_printer()
    printer.widen([name_of(pod) for pod in pods])
    streams = []
    for pod in pods:
        if not has_node(pod):
            print(f"{name_of(pod)}: has no log: {describe_pod(pod)}", file=sys.stderr)
            continue
        container = selection.container or container_of(pod)
        raw = cluster.stream_log(name_of(pod), container, tail=selection.tail, previous=selection.previous)
        lines = _parse(name_of(pod), raw)
        try:
            streams.append((await anext(lines, None), lines))
        except (NotReadyError, NotFoundError) as error:
            print(f"{name_of(pod)}: {error}", file=sys.stderr)
    async for line in _merge(streams):
        printer.print(line)
    if not pods:
        what = f"{selection.role} Pods" if selection.role else "Pods"
        what += f" with a container {selection.container}" if selection.container else ""
        print(
            f"no {what} found; run `rljob explain {selection.job} -n {cluster.namespace}` to see why", file=sys.stderr
        )
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
    """The followers of all Pods seen so far."""

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
            print(message, file=sys.stderr, flush=True)
        num_printed = await _print_for(_POLL_SECONDS, followers.lines, printer)
        if is_last and not num_printed and not followers.are_reading():
            return 0


async def _print_for(seconds: float, lines: asyncio.Queue[Line], printer: Printer) -> int:
    """Print lines as they arrive, for this long. Return their number."""
    num_printed = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                printer.print(await lines.get())
                num_printed += 1
    except TimeoutError:
        return num_printed
