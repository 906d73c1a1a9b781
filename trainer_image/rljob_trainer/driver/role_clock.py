"""Which role worked when, and which phase a moment belongs to. Pure: the caller passes the time of a monotonic clock.

How the driver feeds them (`now` is time.monotonic()):

    roles, phases = RoleClock(now), PhaseClock(now)
    each generation request      roles.begin("rollouts", now) ... roles.end("rollouts", now)
    each reward request          roles.begin("rewards", now)  ... roles.end("rewards", now)
    each call of the agent       roles.begin("tools", now)    ... roles.end("tools", now); or users, runners
    inspect, accumulate, apply   roles.begin("trainer", now)  and phases.begin("update", now)  ... end of both
    publish                      roles.begin("trainer", now)  and phases.begin("publish", now) ... end of both
    a step                       phases.begin("score", now)   ... phases.end("score", now)
    each completion of the       phases.begin("generate", now) ... phases.end("generate", now)
      step's groups
    sync, evaluate, checkpoint   phases.begin(name, now) ... phases.end(name, now)
    changes of turns             the same with sleep and wake
    end of a step                record = {"busy_shares": roles.shares(now), "phase_seconds": phases.take(now)}
                                 roles.reset(now)

What begins must end, also when it fails: the context managers `roles.within` and `phases.within` take a clock. Shares
of roles overlap and may add up to more than 1. Invariant: the phases partition the wall time.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Generic, Literal, TypeVar

from rljob_api.manifest.job_spec import ServiceKind

Role = Literal["rollouts", "rewards", "trainer", "users", "tools", "runners"]
ROLES: tuple[Role, ...] = ("rollouts", "rewards", "trainer")
"""Roles of every job."""
ROLE_OF_SERVICE: dict[ServiceKind, Role] = {"user": "users", "tool": "tools", "runner": "runners"}

Phase = Literal["starting", "generate", "score", "update", "publish", "sleep", "wake", "sync", "evaluate", "checkpoint"]
_PRECEDENCE: tuple[Phase, ...] = (
    *("checkpoint", "publish", "update"),  # the trainer works: whatever else happens costs nothing
    *("sleep", "wake"),  # neither generates nor trains
    *("sync", "generate", "evaluate", "score", "starting"),
)
"""If several are active, the first one gets the time. `score` is active for a whole step, so it gets what remains of
the step: the wait for rewards. `evaluate` is active only while the driver waits for an evaluation, not while one runs
next to training."""


_Name = TypeVar("_Name", Role, Phase)


class _Clock(ABC, Generic[_Name]):
    """Pieces of work that are active now, by name."""

    def __init__(self, now: float) -> None:
        self._num_active: Counter[_Name] = Counter()
        self._seen_at = now

    def begin(self, name: _Name, now: float) -> None:
        """It may begin several times, such as `generate` once for each completion: it ends with the last."""
        self._advance(now)
        self._num_active[name] += 1
        self._select()

    def end(self, name: _Name, now: float) -> None:
        """Raise ValueError if it is not active."""
        self._advance(now)
        if not self._num_active[name]:
            raise ValueError(f"{name} ended more often than it began")
        self._num_active[name] -= 1
        self._select()

    @contextmanager
    def within(self, name: _Name, clock: Callable[[], float]) -> Iterator[None]:
        self.begin(name, clock())
        try:
            yield
        finally:
            self.end(name, clock())

    def _advance(self, now: float) -> None:
        """Count the time until `now`."""
        self._count(now - self._seen_at)
        self._seen_at = now

    @abstractmethod
    def _count(self, seconds: float) -> None: ...

    def _select(self) -> None:
        """What is active has changed."""


class RoleClock(_Clock[Role]):
    """The time in which each role had work: the union of its overlapping pieces of work."""

    def __init__(self, now: float, kinds: Collection[ServiceKind] = ()) -> None:
        """`kinds`: of the job's services. Those of an agent are roles besides ROLES."""
        self._roles = (*ROLES, *(role for kind, role in ROLE_OF_SERVICE.items() if kind in kinds))
        super().__init__(now)
        self._busy = dict.fromkeys(self._roles, 0.0)
        """Seconds since `reset`, up to `_seen_at`."""
        self._reset_at = now

    def is_idle(self) -> bool:
        """Whether no role works."""
        return not any(self._num_active[role] for role in self._roles)

    def num_working(self, role: Role) -> int:
        """Return the number of pieces of work that are active."""
        return self._num_active[role]

    def busy_seconds(self, now: float) -> dict[Role, float]:
        """Return the seconds of work since the last reset."""
        self._advance(now)
        return dict(self._busy)

    def shares(self, now: float) -> dict[Role, float]:
        """Return the share of the time since the last reset in which each role worked; all 0 right after a reset."""
        seconds, total = self.busy_seconds(now), now - self._reset_at
        return {role: min(1.0, busy / total) if total > 0 else 0.0 for role, busy in seconds.items()}

    def reset(self, now: float) -> None:
        """Count from now on. Work in progress stays active."""
        self._advance(now)
        self._busy = dict.fromkeys(self._roles, 0.0)
        self._reset_at = now

    def _count(self, seconds: float) -> None:
        for role in self._roles:
            if self._num_active[role]:
                self._busy[role] += seconds


class PhaseClock(_Clock[Phase]):
    """A partition of the wall time into phases: each moment belongs to one of the active phases, by precedence.

    Time in which none is active belongs to the phase before it; at first, to `starting`.
    """

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self._seconds: dict[Phase, float] = {}
        self.phase: Phase = "starting"
        """The current phase, for /status."""

    def take(self, now: float) -> dict[Phase, float]:
        """Return the seconds by phase since the last call, or since the creation. Their sum is that wall time."""
        self._advance(now)
        taken, self._seconds = self._seconds, {}
        return taken

    def _select(self) -> None:
        self.phase = next((phase for phase in _PRECEDENCE if self._num_active[phase]), self.phase)

    def _count(self, seconds: float) -> None:
        if seconds > 0:
            self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + seconds
