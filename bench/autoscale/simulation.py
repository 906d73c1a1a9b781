"""Discrete-event simulation of the jobs, Pods and requests of a day. Owns time and cost; a scaler chooses the replicas.

The demand comes from rljob_trainer.services.demand. A step has the published seconds on RLJob's roles, with
`schedule.type: onPolicy`: samples end during a generation of 40.6 s, and on its own GPUs the trainer takes each group
once it is scored, 210.1 s in all. Invariant: every sample is scored exactly once, whatever dies.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rljob_core.backend import Demand
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.episodes.types import Episode
from rljob_trainer.services.demand import Forecaster

GENERATE_SECONDS, TRAIN_SECONDS = 40.6, 83.5 + 126.6
"""Generation of a step; its log-probs and updates."""
PUBLISH_SECONDS = 4.0
STARTING_SECONDS = 90.0
"""Startup of trainer and vLLM before a job's first step."""
GROUP_SIZE = 5
POD_START_SECONDS = (20.0, 60.0)
SAMPLE_SECONDS = 10.0
"""Sampling interval of the curves."""
_NUM_LATENCIES = 2048


@dataclass(frozen=True)
class JobSpec:
    """A job of the day. Times are seconds from midnight."""

    name: str
    starts_at: float
    ends_at: float
    samples: int


@dataclass(frozen=True)
class Day:
    """The events of the day, the same for every scaler."""

    jobs: tuple[JobSpec, ...]
    slots: int
    """Slots per Pod."""
    seconds: float
    slow: tuple[float, float, float]
    """Begin, end, and the factor by which the scorer is slower."""
    deaths: tuple[float, ...]
    """Times at which a ready Pod dies and restarts."""
    shortage: tuple[float, float, int]
    """Begin, end, and how many Pods have a node meanwhile."""


class Scaler(Protocol):
    """Chooses the number of replicas."""

    interval_seconds: float
    first_replicas: int

    def decide(self, now: float, simulation: Simulation) -> int: ...


@dataclass
class Sample:
    job: Job
    group: int
    since: float
    """When the group's first request arrived, which decides the place in the queue, as in the driver."""
    seconds: float
    started_at: float = 0.0


@dataclass(eq=False)
class Pod:
    """One replica. It costs since it has a node."""

    index: int
    placed_at: float | None = None
    ready: bool = False
    draining: bool = False
    dead: int = 0
    """Number of deaths: an execution that started before one never ends."""
    running: dict[int, Sample] = field(default_factory=dict)


@dataclass
class Step:
    """One step's outcome."""

    begin: float
    seconds: float
    floor_seconds: float
    """Its time if rewards took none."""
    reaction_seconds: float


class Job:
    """A driver: its steps and its demand."""

    def __init__(self, spec: JobSpec, draw: random.Random) -> None:
        self.spec, self.draw = spec, draw
        self.forecaster = Forecaster(spec.samples, GROUP_SIZE, streams=True)
        self.progress = CollectionProgress()
        self.latencies: deque[float] = deque(maxlen=_NUM_LATENCIES)
        self.due_seconds = self.floor_seconds = 0.0
        """Until when the trainer has other groups, and the time without waits for rewards."""
        self.missing: list[int] = []
        """[groups] Samples without a score."""
        self.first_by_group: dict[int, float] = {}
        """Group -> when its first sample ended."""
        self.scored: list[float] = []
        """When each scored group had its last score, ascending."""
        self.is_active = self.is_open = self.is_last = False
        self.first_ended_at: float | None = None
        self.met_at: float | None = None

    def demand(self, now: float, num_executing: int, oldest: float) -> Demand:
        forecast = self.forecaster.predict_scores(self.progress, now, is_open=self.is_open, is_last=self.is_last)
        ordered = sorted(self.latencies)
        mean = sum(ordered) / len(ordered) if ordered else None
        in_flight = self.progress.num_generated - self.progress.num_scored
        measured = {
            "window_seconds": forecast.window_seconds(mean),
            "in_flight": in_flight,
            "waiting": in_flight - num_executing,
            "oldest_in_flight_seconds": oldest,
            "latency_seconds": mean,
            "latency_p95_seconds": ordered[int(0.95 * (len(ordered) - 1))] if ordered else None,
        }
        reported = forecast.demand.model_copy(update=measured)
        return Demand(self.spec.name, reported)


class Simulation:
    """The simulated day."""

    def __init__(self, day: Day, scaler: Scaler) -> None:
        self.day, self.scaler, self.now = day, scaler, 0.0
        self.jobs = [Job(spec, random.Random(f"0/{spec.name}")) for spec in day.jobs]
        self.pods: list[Pod] = []
        self.queue: list[tuple[float, int, Sample]] = []
        """A heap: the place, the number of the arrival, and the sample."""
        self._arrivals = itertools.count()
        self.steps: list[Step] = []
        self.curves: list[tuple[float, float, int, int]] = []
        """(time, slots by Little's law, slots ready, slots busy)"""
        self.paid_slot_seconds = self.used_slot_seconds = self.busy_slot_seconds = 0.0
        self.num_changes = 0
        self.desired = 0
        self._draw = random.Random("0/pods")
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._indices = itertools.count()
        self._executions = itertools.count()
        self._since = 0.0

    def run(self) -> Simulation:
        for job in self.jobs:
            self._schedule(job.spec.starts_at, functools.partial(self._start_job, job))
        for moment in self.day.deaths:
            self._schedule(moment, self._kill_one)
        for moment in self.day.shortage[:2]:
            self._schedule(moment, self._place_all)
        self._set_desired(self.scaler.first_replicas)
        self._schedule(0.0, self._decide)
        self._schedule(0.0, self._sample)
        while self._events and (self._events[0][0] <= self.day.seconds or any(job.is_active for job in self.jobs)):
            moment, _, act = heapq.heappop(self._events)
            self._advance_to(moment)
            act()
        return self

    def _schedule(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _advance_to(self, moment: float) -> None:
        """Advance the clock to `moment` and count the cost."""
        passed = moment - self.now
        if passed > 0:
            self.paid_slot_seconds += passed * self.day.slots * sum(pod.placed_at is not None for pod in self.pods)
            self.busy_slot_seconds += passed * self.num_busy
        self.now = moment

    @property
    def num_busy(self) -> int:
        return sum(len(pod.running) for pod in self.pods)

    @property
    def num_ready(self) -> int:
        return sum(pod.ready and not pod.draining for pod in self.pods)

    def required_slots(self) -> float:
        """Return the slots that the open steps require, from the true mean latency and window."""
        mean = 20.5 * self._slowness()
        return sum(job.spec.samples * mean / job.due_seconds for job in self.jobs if job.is_open)

    def demands(self) -> list[Demand]:
        found = []
        for job in self.jobs:
            if job.is_active:
                executing = [s for pod in self.pods for s in pod.running.values() if s.job is job]
                ages = [self.now - sample.started_at for sample in executing]
                found.append(job.demand(self.now, len(executing), max(ages, default=0.0)))
        return found

    def _decide(self) -> None:
        self._set_desired(self.scaler.decide(self.now, self))
        self._schedule(self.now + self.scaler.interval_seconds, self._decide)

    def _sample(self) -> None:
        self.curves.append((self.now, self.required_slots(), self.num_ready * self.day.slots, self.num_busy))
        self._schedule(self.now + SAMPLE_SECONDS, self._sample)

    def _set_desired(self, replicas: int) -> None:
        self.num_changes += replicas != self.desired
        self.desired = replicas
        staying = [pod for pod in self.pods if not pod.draining]
        for _ in range(replicas - len(staying)):
            self.pods.append(Pod(next(self._indices)))
        # Like a ReplicaSet: first Pods without a node, then unready ones, then the newest.
        excess = sorted(staying, key=lambda pod: (pod.placed_at is not None, pod.ready, -pod.index))
        for pod in excess[: max(0, len(staying) - replicas)]:
            pod.draining = True
        self._reap()
        self._place_all()

    def _reap(self) -> None:
        self.pods = [pod for pod in self.pods if not pod.draining or (pod.ready and pod.running)]

    def _place_all(self) -> None:
        begin, end, max_pods = self.day.shortage
        room = max_pods if begin <= self.now < end else 10**9
        placed = sum(pod.placed_at is not None for pod in self.pods)
        for pod in self.pods:
            if pod.placed_at is None and placed < room:
                pod.placed_at = self.now
                placed += 1
                self._start_pod(pod)

    def _start_pod(self, pod: Pod) -> None:
        life = pod.dead

        def become_ready() -> None:
            if pod in self.pods and pod.dead == life:
                pod.ready = True
                self._dispatch()
                self._record_ready()

        self._schedule(self.now + self._draw.uniform(*POD_START_SECONDS), become_ready)

    def _kill_one(self) -> None:
        ready = [pod for pod in self.pods if pod.ready and not pod.draining]
        if not ready:
            return
        pod = self._draw.choice(ready)
        for sample in pod.running.values():
            self._enqueue(sample)
        pod.running.clear()
        pod.ready, pod.dead = False, pod.dead + 1
        self._start_pod(pod)
        self._dispatch()

    def _dispatch(self) -> None:
        usable = [pod for pod in self.pods if pod.ready and not pod.draining and len(pod.running) < self.day.slots]
        while self.queue and usable:
            pod = min(usable, key=lambda pod: len(pod.running))
            self._execute(pod, heapq.heappop(self.queue)[-1])
            if len(pod.running) >= self.day.slots:
                usable.remove(pod)

    def _execute(self, pod: Pod, sample: Sample) -> None:
        number, life = next(self._executions), pod.dead
        pod.running[number] = sample
        sample.started_at = self.now

        def end() -> None:
            if pod.dead != life:
                return
            del pod.running[number]
            self.used_slot_seconds += sample.seconds
            self._record_score(sample)
            self._reap()
            self._dispatch()

        self._schedule(self.now + sample.seconds, end)

    def _start_job(self, job: Job) -> None:
        job.is_active = True
        self._schedule(self.now + STARTING_SECONDS, functools.partial(self._begin_step, job))

    def _begin_step(self, job: Job) -> None:
        if self.now >= job.spec.ends_at:
            job.is_active = False
            return
        job.forecaster.record_begin(self.now)
        job.progress = CollectionProgress("train", job.spec.samples, GROUP_SIZE, started_at=self.now)
        job.is_open, job.is_last, job.first_ended_at, job.met_at, job.scored = True, False, None, None, []
        ends = list(_ends(job))
        groups = sorted(max(ends[i : i + GROUP_SIZE]) for i in range(0, len(ends), GROUP_SIZE))
        job.missing, job.first_by_group = [GROUP_SIZE] * len(groups), {}
        job.due_seconds = max(GENERATE_SECONDS, groups[0] + TRAIN_SECONDS * (1 - 1 / len(groups)))
        job.floor_seconds = _end_of_training(groups) + PUBLISH_SECONDS
        for i, end in enumerate(ends):
            self._schedule(self.now + end, functools.partial(self._end_sample, job, i // GROUP_SIZE))

    def _end_sample(self, job: Job, group: int) -> None:
        job.progress.record_ended(Episode(0, group, 0, ended_at=self.now))
        if job.first_ended_at is None:
            job.first_ended_at = self.now
            self._record_ready()
        since = job.first_by_group.setdefault(group, self.now)
        self._enqueue(Sample(job, group, since, job.draw.uniform(1, 40) * self._slowness()))
        self._dispatch()

    def _enqueue(self, sample: Sample) -> None:
        heapq.heappush(self.queue, (sample.since, next(self._arrivals), sample))

    def _slowness(self) -> float:
        begin, end, factor = self.day.slow
        return factor if begin <= self.now < end else 1.0

    def _record_ready(self) -> None:
        """Record when a burst first had the slots that Little's law requires."""
        num_open = sum(job.spec.samples for job in self.jobs if job.is_open)
        if self.num_ready * self.day.slots >= min(self.required_slots(), num_open):
            for job in self.jobs:
                if job.is_open and job.first_ended_at is not None and job.met_at is None:
                    job.met_at = self.now

    def _record_score(self, sample: Sample) -> None:
        job = sample.job
        job.latencies.append(sample.seconds)
        job.progress.num_scored += 1
        job.progress.scored_at = self.now
        job.missing[sample.group] -= 1
        if not job.missing[sample.group]:
            job.scored.append(self.now)
        if len(job.scored) == len(job.missing):
            self._finish_step(job)

    def _finish_step(self, job: Job) -> None:
        """All samples are scored: only GPU work remains."""
        begin = job.progress.started_at
        ends = _end_of_training(job.scored) + PUBLISH_SECONDS
        job.is_open, job.is_last = False, ends >= job.spec.ends_at
        job.forecaster.record_end(job.progress, TRAIN_SECONDS)
        first = job.first_ended_at or begin
        reaction = (job.met_at if job.met_at is not None else self.now) - first
        self.steps.append(Step(begin, ends - begin, job.floor_seconds, reaction))
        self._schedule(ends, functools.partial(self._begin_step, job))


def _ends(job: Job) -> Iterator[float]:
    """Yield when the samples end, in seconds since the begin. Lengths are uneven; the last one ends the generation."""
    for _ in range(job.spec.samples - 1):
        yield GENERATE_SECONDS * job.draw.betavariate(2, 2)
    yield GENERATE_SECONDS


def _end_of_training(scored_at: Sequence[float]) -> float:
    """Return when the trainer has trained all groups. It takes each once it is scored."""
    end = 0.0
    for at in scored_at:
        end = max(end, at) + TRAIN_SECONDS / len(scored_at)
    return end
