"""Which groups may start, and which may train now. A pure state machine: the driver samples, scores and trains.

    start --> in flight --record_scored--> scored --take--> in the current step --finish_step--> trained
                  |                           |
                  +---------- replace --------+--> leaves, and another group may start

B is groups_per_step and k is max_staleness. Steps are numbered by the steps finished before them: step t turns the
weights of version t into version t + 1. A group that starts at version d must train by step d + k, its deadline.
Invariant: each group trains exactly once or is replaced, no group trains after its deadline, and no step waits for a
group whose slot another scored group could take. No group is discarded for its age: admission bounds staleness.

Why a step can always be completed, and in time. Let taken be the groups that the current step t has. For each deadline
D from t to t + k let

    spare(D) = (D - t + 1) B - taken - (groups not taken with a deadline of at most D)

be the slots of the steps t..D that no group needs by then. If spare(D) >= 0 for all D, then training by deadline is in
time (Hall's theorem for jobs of one slot). Each transition preserves this:

- start: the new deadline is t + k, the last one, so that only spare(t + k) changes. Admission requires
  dispatched - replaced < (t + k + 1) B, and t B groups have trained in finished steps. So fewer than (k + 1) B are
  taken or waiting, which means spare(t + k) >= 1.
- record_scored: changes no term. replace: spare grows. The group that starts in its place has the current version, so
  its deadline is not earlier, and it needs admission like any other.
- take, of a group with deadline e: spare(D) falls by one for D < e and stays for D >= e, where the group was counted.
  `take` requires spare(D) >= 1 for D < e. For k <= 1 these are the slots that due groups need in the current step. For
  k >= 2 those of the steps between count, too: with k = 2, B = 1 and groups 0, 1, 2 of version 0, step 1 must not train
  group 3 in place of group 1, as step 2 cannot train both 1 and 2.
- finish_step: taken = B, so that spare(D) stays for all D > t; the new spare(t + k + 1) = spare(t + k) + B. And
  spare(t) >= 0 with taken = B shows that no due group is left.

So at most (t + 1) B groups are due by the end of step t, and exactly (t + 1) B have trained by then, among them all
that are due. No deadlock: if all groups in flight are scored and taken < B, the oldest waiting group can be taken, as
no group is due before it and spare(D) = (D - t + 1) B - taken >= 1 for D < e. If no group waits, admission lets one
start. `max_replacements` bounds the replacements in each step; after that, groups train without signal.

A group of version d trains in one of the steps d to d + k. So what has trained by step t contains all that was
dispatched up to version t - k and nothing dispatched after version t: slow prompts, or long answers, are never
underrepresented by more than the (k + 1) B groups under way, however long the job runs.
"""

from collections import Counter
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class Ticket:
    """One group, from its start until it has trained."""

    index: int
    """Running number in order of dispatch. Replaced groups have one, too."""
    version: int
    """Finished steps when it started."""


class DispatchState(BaseModel):
    """A dispatcher in a checkpoint: that of weights with `finished_steps`, from which a new one continues."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    finished_steps: int = 0
    next_index: int = 0
    num_replaced: int = 0
    """In the current step."""
    tickets: tuple[Ticket, ...] = ()
    """All groups that were dispatched, and neither replaced nor trained in a finished step; oldest first."""


class Dispatcher:
    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        state: DispatchState | None = None,
        *,
        total_steps: int | None = None,
        max_replacements: int = 0,
        first_step: int = 0,
    ) -> None:
        """`max_replacements`: groups per step that may be replaced. `first_step`: the steps before it need no groups,
        and none starts in them."""
        state = state or DispatchState()
        self.finished_steps = state.finished_steps
        self.total_steps = total_steps
        """No group starts that only a later step could train. None: no end. May change at any time."""
        self.tickets_to_restart = state.tickets
        """Groups that the snapshot had under way. Their episodes are lost: start them again, with these tickets."""
        self._groups_per_step, self._max_staleness, self._first_step = groups_per_step, max_staleness, first_step
        self._max_replacements = max_replacements
        self._next_index, self._num_replaced = state.next_index, state.num_replaced
        self._waiting = {ticket.index: ticket for ticket in state.tickets}
        """Not taken, oldest first: versions never fall from one index to the next."""
        self._num_waiting = Counter(ticket.version for ticket in state.tickets)
        """Version -> waiting groups."""
        self._scored: set[int] = set()
        """Indices of waiting groups."""
        self._taken: list[Ticket] = []

    @property
    def num_left(self) -> int:
        """Groups that the current step still needs."""
        return 0 if self.finished_steps < self._first_step else self._groups_per_step - len(self._taken)

    @property
    def num_in_flight(self) -> int:
        """Groups that have started and have no score."""
        return len(self._waiting) - len(self._scored)

    @property
    def num_scored(self) -> int:
        """Groups that are scored and not taken."""
        return len(self._scored)

    @property
    def num_admitted(self) -> int:
        """Groups that started since the job's first step, without the replaced ones."""
        return self.finished_steps * self._groups_per_step + len(self._taken) + len(self._waiting)

    @property
    def num_startable(self) -> int:
        """Groups that may start now."""
        if self.finished_steps < self._first_step:
            return 0
        steps = self.finished_steps + self._max_staleness + 1
        if self.total_steps is not None:
            steps = min(steps, self.total_steps)
        return max(0, steps * self._groups_per_step - self.num_admitted)

    def can_start(self) -> bool:
        return self.num_startable > 0

    def start(self) -> Ticket:
        """Admit the next group, at the current version. Raise ValueError unless `can_start`."""
        if not self.can_start():
            raise ValueError("a group starts only if can_start()")
        ticket = Ticket(self._next_index, self.finished_steps)
        self._next_index += 1
        self._waiting[ticket.index] = ticket
        self._num_waiting[ticket.version] += 1
        return ticket

    def record_scored(self, index: int) -> None:
        """Record that all episodes of a waiting group have their scores."""
        self._scored.add(self._waiting[index].index)

    def can_replace(self) -> bool:
        return self._num_replaced < self._max_replacements

    def replace(self, index: int) -> None:
        """Remove a waiting group, scored or not: it will not train, and another may start. Raise ValueError unless
        `can_replace`."""
        if not self.can_replace():
            raise ValueError("a group is replaced only if can_replace()")
        self._remove(index)
        self._num_replaced += 1

    def take(self, limit: int) -> list[Ticket]:
        """Move up to `limit` scored groups into the current step and return them, oldest first.

        An older group without a score is passed over unless it could then miss its deadline. The step gets no more
        groups than it needs: once it has B, spare(t) is 0, and none is due.
        """
        spare = self._spare_slots()
        taken: list[Ticket] = []
        for ticket in map(self._waiting.__getitem__, sorted(self._scored)):
            earlier = range(ticket.version + self._max_staleness - self.finished_steps)
            if len(taken) == limit or any(spare[step] == 0 for step in earlier):
                break  # what blocks a group blocks all younger ones
            for step in earlier:
                spare[step] -= 1
            taken.append(ticket)
        for ticket in taken:
            self._remove(ticket.index)
        self._taken += taken
        return taken

    def waits_for(self) -> list[Ticket]:
        """Return the groups without a score that must train now, or that keep the step from taking younger ones.

        Empty if the step is full, or if any group that is scored next may train in it.
        """
        if not self.num_left:
            return []
        spare = self._spare_slots()
        last = next((step for step, slots in enumerate(spare) if slots == 0), 0)
        return [
            ticket
            for ticket in self._waiting.values()
            if ticket.version + self._max_staleness <= self.finished_steps + last and ticket.index not in self._scored
        ]

    def finish_step(self) -> None:
        """Count the current step. Raise ValueError if it still needs groups."""
        if self.num_left:
            raise ValueError(f"step {self.finished_steps} still needs {self.num_left} groups")
        self._taken = []
        self._num_replaced = 0
        del self._num_waiting[self.finished_steps - self._max_staleness]
        self.finished_steps += 1

    def snapshot(self) -> DispatchState:
        """Return the state that fits weights of version `finished_steps`: what the current step took is under way."""
        tickets = [*self._taken, *self._waiting.values()]
        return DispatchState(
            finished_steps=self.finished_steps,
            next_index=self._next_index,
            num_replaced=self._num_replaced,
            tickets=tuple(sorted(tickets, key=lambda ticket: ticket.index)),
        )

    def _spare_slots(self) -> list[int]:
        """Return spare(D) of the module's docstring for D = t, t + 1, ..., t + k."""
        free, spare = -len(self._taken), []
        for step in range(self.finished_steps, self.finished_steps + self._max_staleness + 1):
            free += self._groups_per_step - self._num_waiting[step - self._max_staleness]
            spare.append(free)
        return spare

    def _remove(self, index: int) -> None:
        self._num_waiting[self._waiting.pop(index).version] -= 1
        self._scored.discard(index)
