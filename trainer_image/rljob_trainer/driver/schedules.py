"""How the loop takes scored groups and changes weights: one small object per spec.schedule.type.

The dispatcher bounds staleness; a schedule chooses the bound, the order in which groups train, and whether requests
may run while weights change. The loop is the same for all.
"""

from dataclasses import dataclass
from typing import Protocol

from rljob_api.manifest.schedule import Schedule
from rljob_trainer.driver.dispatcher import Dispatcher, Ticket


class StepSchedule(Protocol):
    @property
    def max_staleness(self) -> int:
        """Steps by which a group's start may precede the step that trains it. 0: nothing starts for later steps."""
        ...

    @property
    def spans_updates(self) -> bool:
        """Whether requests run on while weights change. If not, no request starts until those in flight have ended and
        the new weights are served. With max_staleness 0 none is in flight then."""
        ...

    def take(self, dispatcher: Dispatcher, limit: int) -> list[Ticket]:
        """Return up to `limit` groups that train next, in this order. They are then part of the current step."""
        ...


@dataclass(frozen=True)
class Synchronous:
    """Train when all groups of the step are scored, in order of dispatch: what does not depend on who is faster."""

    max_staleness: int = 0
    spans_updates: bool = False

    def take(self, dispatcher: Dispatcher, limit: int) -> list[Ticket]:
        return dispatcher.take(limit) if dispatcher.num_scored >= dispatcher.num_left else []


@dataclass(frozen=True)
class Streaming:
    """Train each group as soon as it is scored."""

    max_staleness: int
    spans_updates: bool

    def take(self, dispatcher: Dispatcher, limit: int) -> list[Ticket]:
        return dispatcher.take(limit)


def build_schedule(spec: Schedule) -> StepSchedule:
    if spec.type == "synchronous":
        return Synchronous()
    return Streaming(spec.staleness, spans_updates=spec.type == "bounded")
