"""Which rank of a group hangs. `RankWatch` is pure: it hears, once a second, what the ranks say.

Two kinds of hangs. A rank that says nothing, though its process exists: stopped, in the kernel, or with the interpreter
held. And a call that does not end: then the rank that has entered the fewest collectives is behind, and the others wait
for it. Leaves kills to the group. Invariant: only time in which the watch ran, and was not paused, counts.

The rest asks the ranks, through Ray: how far they are, and for their stacks. What a group that hangs can still say is
bounded in time: who does not answer within some seconds has nothing to say.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.actor import ActorHandle

from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.liveness.judge import Beat, Hang, Judge
from rljob_trainer.liveness.stacks import describe_process
from rljob_trainer.ranks.ray_node import PROCESS_NAME

log = logging.getLogger(__name__)

SILENT_SECONDS = 5.0
"""In a call that hangs, a rank that has said nothing for this long is the cause."""
_IDLE = "waiting for a call"
_START = "the start of its process"
"""What a rank does before its first answer. Its limit is that of earlier groups' starts."""
_MAX_NAMED = 8


@dataclass(frozen=True)
class HungRanks:
    """Ranks that hang, and what shows it."""

    ranks: list[int]
    """All ranks, if nothing tells the culprit from those that wait for it."""
    silent: frozenset[int]
    hang: Hang
    doing: str


@dataclass
class _Rank:
    heard_at: float
    """When it last answered, or was first asked."""
    beat: Beat | None = None
    """The last one."""


@dataclass
class RankWatch:
    """The state of one group."""

    judge: Judge
    """It hears the calls, and which ranks have started."""
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _call: str = ""
    _longest_silence: float | None = None
    """Since the current call began, or since the last one ended; None: no rank answered."""

    @contextlib.contextmanager
    def calling(self, method: str) -> Iterator[None]:
        """Within, a call of all ranks runs; it is the only one but for the write of a checkpoint."""
        self._end_span()
        self._call = method
        try:
            with self.judge.running(method):
                yield
                self._end_span()
        finally:
            self._longest_silence, self._call = None, ""

    def record_asked(self, rank: int) -> None:
        if rank not in self._ranks:
            self._ranks[rank] = _Rank(self.judge.now)
            self.judge.hear(f"rank {rank}", Beat(0, _START))

    def record_beat(self, rank: int, beat: Beat) -> None:
        """An answer of a rank that was asked."""
        known = self._ranks[rank]
        if known.beat is None:
            self.judge.hear(f"rank {rank}", Beat(1))
        else:
            self._longest_silence = max(self._longest_silence or 0.0, self.silence(rank))
        known.beat, known.heard_at = beat, self.judge.now

    @property
    def num_waiting(self) -> int:
        """Engines that wait for weights, as the ranks have said last."""
        return sum(each.beat.num_waiting for each in self._ranks.values() if each.beat)

    def silence(self, rank: int) -> float:
        """Return the seconds for which this rank has said nothing."""
        return self.judge.now - self._ranks[rank].heard_at

    def find_hung(self, returned: Collection[int] = ()) -> HungRanks | None:
        """Return what hangs now. `returned`: the ranks whose part of the current call has ended."""
        kind = self._silence_kind()
        limit = self.judge.pace.limit(kind)
        silent = [rank for rank, each in self._ranks.items() if each.beat and self.silence(rank) > limit]
        if silent:
            longest = max(map(self.silence, silent))
            return HungRanks(silent, frozenset(silent), Hang(kind, longest, limit), self._describe(silent))
        hang = self.judge.find_hang()
        if hang is None:
            return None
        quiet = [rank for rank in self._ranks if self.silence(rank) > SILENT_SECONDS]
        beats = {rank: each.beat for rank, each in self._ranks.items() if each.beat and rank not in returned}
        ranks = quiet or find_behind(beats)
        return HungRanks(ranks, frozenset(quiet), hang, self._describe(ranks))

    def _silence_kind(self) -> str:
        return f"silence in {self._call or _IDLE}"

    def _end_span(self) -> None:
        """Learn from the time in which the ranks did one thing."""
        if self._longest_silence is not None:
            self.judge.pace.record(self._silence_kind(), self._longest_silence)
        self._longest_silence = None

    def _describe(self, ranks: Sequence[int]) -> str:
        doing = f"in {self._call}" if self._call else _IDLE
        beat = self._ranks[ranks[0]].beat if ranks else None
        if beat is None:
            return doing
        where = f", {beat.doing}" if beat.doing else ""
        return f"{doing}{where}, after {beat.num_done} collectives"


def find_behind(beats: Mapping[int, Beat]) -> list[int]:
    """Return the ranks that have entered the fewest collectives: all, if they are equally far."""
    fewest = min((beat.num_done for beat in beats.values()), default=0)
    return sorted(rank for rank, beat in beats.items() if beat.num_done == fewest)


def hung_error(hung: HungRanks, why: str) -> TrainerGroupDiedError:
    """Return the error of a group whose ranks hang. `why`: what they do, and what the kernel says."""
    names = [f"rank {rank}" for rank in hung.ranks[:_MAX_NAMED]]
    others = f" and {len(hung.ranks) - _MAX_NAMED} others" if len(hung.ranks) > _MAX_NAMED else ""
    error = TrainerGroupDiedError(f"{', '.join(names) or 'a rank'}{others} hangs {why}: nothing for {hung.hang}")
    action = "the trainer group restarts from its last checkpoint"
    error.hung = tuple(hung.hang.blame("trainer", name, why, action) for name in names)
    return error


def future(reference: Any) -> asyncio.Future[Any]:
    return asyncio.wrap_future(reference.future())


async def wait_for(calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    """Wait until all calls have ended or one has failed. Return the errors."""
    if calls:
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
    return find_errors(calls)


def find_errors(calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    """Return the errors of the calls that have ended."""
    return [error for call in calls if call.done() and not call.cancelled() and (error := call.exception())]


_ANSWER_SECONDS = 0.2
"""For which a round waits for the answers. What comes later is read in the next one."""


class Heartbeats:
    def __init__(self, watch: RankWatch) -> None:
        self._watch = watch
        self._asked: dict[ActorHandle, asyncio.Future[Any]] = {}

    async def ask(self, ranks: Sequence[ActorHandle]) -> list[BaseException]:
        """Ask the ranks that have answered before, and read the answers. Return the errors: of ranks that have died."""
        errors = self._read(ranks)  # those that came since the last round
        for number, rank in enumerate(ranks):
            self._watch.record_asked(number)
            if rank not in self._asked:
                self._asked[rank] = future(rank.beat.remote())
                self._asked[rank].add_done_callback(_read_error)
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=_ANSWER_SECONDS)
        return errors + self._read(ranks)

    def _read(self, ranks: Sequence[ActorHandle]) -> list[BaseException]:
        done = [
            (number, self._asked.pop(rank))
            for number, rank in enumerate(ranks)
            if rank in self._asked and self._asked[rank].done()
        ]
        for number, call in done:
            if not call.exception():
                self._watch.record_beat(number, call.result())
        return find_errors([call for _, call in done])


def _read_error(call: asyncio.Future[Any]) -> None:
    """Mark the error as read: who is killed after the last round never answers, and asyncio would log that."""
    if not call.cancelled():
        call.exception()


_SECONDS = 5.0
_NUM_STACKS = 4
"""Ranks that wait for another one all have the same stack."""


async def log_stacks(ranks: Sequence[ActorHandle], hung: Collection[int], silent: Collection[int]) -> None:
    """Log the stacks of ranks, those that hang first."""
    answering = [rank for rank in sorted(range(len(ranks)), key=lambda rank: rank not in hung) if rank not in silent]
    chosen = answering[:_NUM_STACKS]
    stacks = await asyncio.gather(*(_ask(ranks[rank].dump_stacks.remote()) for rank in chosen))
    for rank, stack in zip(chosen, stacks, strict=True):
        log.error("rank %d %s, its stacks:\n%s", rank, "hangs" if rank in hung else "waits", stack or "it gives none")


async def describe_silent(
    ranks: Sequence[ActorHandle], process_ids: Sequence[int], addresses: Sequence[str], silent: Collection[int]
) -> str:
    """Return why the silent ranks give no stacks, as another rank of the same Pod sees it."""
    rank, state = min(silent), ""
    if rank < len(process_ids):
        pid, address = process_ids[rank], addresses[rank]
        peers = [peer for peer in range(len(ranks)) if peer not in silent and addresses[peer] == address]
        if peers:
            state = await _ask(ranks[peers[0]].describe_process.remote(pid))
        else:  # under `rljob run`, this process sees it, too
            state = describe_process(pid, PROCESS_NAME)
    return f"its process does not answer (state {state})" if state else "its process does not answer"


async def _ask(reference: Any) -> str:
    try:
        async with asyncio.timeout(_SECONDS):
            return str(await future(reference))
    except Exception:  # of any kind: it is about to be killed
        return ""
