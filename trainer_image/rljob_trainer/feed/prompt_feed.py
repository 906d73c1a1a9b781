"""The prompts of training in their order, over all sources.

    mixture: which source --> its cursor: which row --> curriculum: is it due?  no: the next row
                                                                                yes: a group starts

Owns the cursors, the counts and the success seen. Invariant: the next prompt is a pure function of the seed and the
state, and the state is all that a checkpoint has. What groups did counts at the end of a step, in the order of
their start, so that a synchronous job has one order. Without a curriculum, each prompt of a source is drawn once in
each of its epochs.

A curriculum draws prompts less often whose groups always, or never, succeed. A group in which each sample succeeds, or
none, has no advantage under group baselines, and is a waste of rollouts. Such prompts tend to stay so for some epochs,
which GRESO found (Zheng et al., arXiv:2506.02177): it skips a prompt before its rollout with the probability 1 - p^z
after z groups in sequence without a signal. Here p is 1/2, and epochs are counted in place of a draw: a prompt with a
streak of z is due in one of every 2^z epochs, up to a limit. Which one depends on the seed and its row, so that
prompts of one streak spread over the epochs. Intervals are powers of two, so that a row is due in each epoch in which
it is with a longer one: a result that comes late cannot let it miss its turn.

Invariants: whether a row is due is a pure function of the seed, the epoch and its streak; each row is due at least once
in any `limit` epochs, so no prompt is lost; a group of mixed results makes a prompt due in each epoch again.
"""

import base64
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from rljob_api.manifest.job_sections import Curriculum
from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Group

MAX_STREAK = 10
"""Longer ones are not counted: 2^10 is the highest limit of epochs."""


def judge_group(group: Group, success: float) -> int | None:
    """Return 1 if each valid sample succeeded, -1 if none did, and 0 if some did; None if no sample is valid.

    A sample succeeds if its reward, as training raises it, is at least `success`."""
    rewards = [reward for episode in group.episodes if (reward := episode.total_reward) is not None]
    num_succeeded = sum(reward >= success for reward in rewards)
    if not rewards:
        return None
    return 1 if num_succeeded == len(rewards) else -1 if not num_succeeded else 0


class SuccessHistory:
    """The streaks of the prompts of one source: 1 byte a row."""

    def __init__(self, num_rows: int, settings: Curriculum, packed: str = "", *, seed: int, source: int = 0) -> None:
        """`packed`: of `pack`. `source`: number of the source in the job."""
        self._settings = settings
        self._streaks: NDArray[np.int8] = unpack(packed, num_rows)
        """[rows] Groups in sequence that succeeded (above 0) or failed (below 0) as a whole."""
        draws = np.random.Generator(np.random.PCG64([seed, source, 0, 1]))  # not an order of rows
        self._phases = draws.integers(0, 2**31, num_rows)
        """[rows] Which of the epochs a row is due in."""

    def record(self, row: int, result: int) -> None:
        """Count a group of the row: 1 succeeded, -1 failed, 0 mixed (`judge_group`)."""
        streak = int(self._streaks[row])
        continued = streak + result if streak * result >= 0 else result
        self._streaks[row] = max(-MAX_STREAK, min(MAX_STREAK, continued)) if result else 0

    def interval(self, row: int) -> int:
        """Return in one of how many epochs the row is due."""
        streak = int(self._streaks[row])
        limit = self._settings.easy_epochs if streak > 0 else self._settings.hard_epochs
        return 1 << min(abs(streak), limit.bit_length() - 1)

    def is_due(self, row: int, epoch: int) -> bool:
        return (epoch + int(self._phases[row])) % self.interval(row) == 0

    def pack(self) -> str:
        """Return the streaks as text; empty if there are none."""
        return base64.b64encode(zlib.compress(self._streaks.tobytes(), 1)).decode() if self._streaks.any() else ""


def unpack(packed: str, num_rows: int) -> NDArray[np.int8]:
    """Return the streaks of `num_rows` rows. Rows that the data did not have before have none."""
    streaks = np.zeros(num_rows, np.int8)
    if packed:
        found = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.int8)[:num_rows]
        streaks[: len(found)] = found
    return streaks


@dataclass(frozen=True)
class Cursor:
    epoch: int = 0
    position: int = 0


def epoch_order(num_rows: int, epoch: int, *, seed: int, shuffle: bool, source: int = 0) -> NDArray[np.int64]:
    """Return the rows in the order of one epoch of a source, by its number in the job.  [rows]"""
    if not shuffle:
        return np.arange(num_rows)
    return np.random.Generator(np.random.PCG64([seed, epoch, source])).permutation(num_rows)


class EpochReader:
    """Reads the rows of one source in order, epoch after epoch. It keeps the order of the current epoch: 8 bytes a row.

    Invariant: the row at (epoch, position) is a pure function of the number of rows, the seed, the source's number and
    that pair, so a cursor of two integers resumes exactly. Rows that are left out are skipped, so a new limit changes
    nothing about the others.
    """

    def __init__(self, prompts: PromptSet, cursor: Cursor, *, seed: int, shuffle: bool, source: int = 0) -> None:
        """`prompts`: at least one. `source`: number of the source in the job."""
        self.cursor = cursor
        self._prompts, self._seed, self._shuffle, self._source = prompts, seed, shuffle, source
        self._epoch, self._order = cursor.epoch, self._order_of(cursor.epoch)

    def next_row(self, is_due: Callable[[int, int], bool] = lambda row, epoch: True) -> tuple[int, int]:
        """Return the next row that has a prompt and is due in its epoch, and how many prompts were not due before it.

        Each row must be due in some epoch: else this never returns."""
        num_skipped = 0
        while True:
            row, epoch = self._advance()
            if row in self._prompts.by_row:
                if is_due(row, epoch):
                    return row, num_skipped
                num_skipped += 1

    def _advance(self) -> tuple[int, int]:
        epoch, position = self.cursor.epoch, self.cursor.position
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        is_last = position + 1 == self._prompts.num_rows
        self.cursor = Cursor(epoch + 1, 0) if is_last else Cursor(epoch, position + 1)
        return int(self._order[position]), epoch

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        return epoch_order(self._prompts.num_rows, epoch, seed=self._seed, shuffle=self._shuffle, source=self._source)


def choose_source(weights: Sequence[float], drawn: Sequence[int]) -> int:
    """Return the number of the source of the next prompt; of equal ones, the first. `drawn`: prompts of each so far.

    Weights are met by counting, and not by drawing: the source that is furthest behind its share comes next.
    Independent draws, as torch's WeightedRandomSampler makes them, differ from the weights by about sqrt(n) after n
    prompts. Here no source is ever ahead of its share by one prompt or more, and none is behind by as many as there are
    other sources.

    Why: before each choice the shares of the next prompt are added to what each source is owed, so the sum of all debts
    is 1, and the largest is above 0. The chosen source then gets 1 prompt, which leaves it owed more than -1. The
    others are owed more than -1, too, and the sum is 0 again, so each debt is below the number of the other sources.
    """
    total, weight = sum(drawn) + 1, sum(weights)
    return max(range(len(weights)), key=lambda source: total * weights[source] / weight - drawn[source])


@dataclass(frozen=True)
class PromptSource:
    """One source of training prompts."""

    name: str
    weight: float
    prompts: PromptSet


class PromptKey(NamedTuple):
    """A prompt of the job."""

    source: str
    """Name of its source."""
    row: int


class Result(NamedTuple):
    """What a group did that counts at the end of the step."""

    group: int
    key: PromptKey
    result: int
    """What `judge_group` returned."""


class SourceState(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    cursor: Cursor = Cursor()
    """Where the next prompt is looked for."""
    num_drawn: int = 0
    """Prompts of groups that have started."""
    streaks: str = ""
    """What SuccessHistory.pack returned: at most 1 byte a row, and base64. Empty without a curriculum."""


class FeedState(BaseModel):
    """A feed in a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: dict[str, SourceState] = {}
    """By name."""
    results: tuple[Result, ...] = ()
    """Results of groups that were replaced in the current step."""


class _Source:
    def __init__(
        self,
        number: int,
        source: PromptSource,
        state: SourceState,
        curriculum: Curriculum | None,
        *,
        seed: int,
        shuffle: bool,
    ) -> None:
        self.prompts, self.num_drawn = source.prompts, state.num_drawn
        self._reader = EpochReader(source.prompts, state.cursor, seed=seed, shuffle=shuffle, source=number)
        self._packed = state.streaks
        self.history: SuccessHistory | None = None
        if curriculum is not None:
            num_rows = source.prompts.num_rows
            self.history = SuccessHistory(num_rows, curriculum, state.streaks, seed=seed, source=number)

    def draw(self) -> tuple[int, int]:
        self.num_drawn += 1
        return self._reader.next_row(self.history.is_due) if self.history else self._reader.next_row()

    def snapshot(self) -> SourceState:
        streaks = self.history.pack() if self.history else self._packed
        return SourceState(cursor=self._reader.cursor, num_drawn=self.num_drawn, streaks=streaks)


class PromptFeed:
    def __init__(
        self,
        sources: Sequence[PromptSource],
        state: FeedState,
        curriculum: Curriculum | None = None,
        *,
        seed: int,
        shuffle: bool,
    ) -> None:
        """`sources`: in the order of the job, each with at least one prompt. `seed`: spec.schedule.seed. `shuffle`:
        spec.data.shuffle."""
        self._curriculum = curriculum
        self._weights = [source.weight for source in sources]
        self._sources = {
            source.name: _Source(
                number,
                source,
                state.sources.get(source.name, SourceState()),
                curriculum,
                seed=seed,
                shuffle=shuffle,
            )
            for number, source in enumerate(sources)
        }
        self._results = list(state.results)
        self.num_skipped = 0
        """Prompts that the curriculum has passed over."""

    def draw(self) -> PromptKey:
        """Return the prompt of the group that starts next."""
        sources = list(self._sources.items())
        name, source = sources[choose_source(self._weights, [each.num_drawn for _, each in sources])]
        row, num_skipped = source.draw()
        self.num_skipped += num_skipped
        return PromptKey(name, row)

    def prompt(self, key: PromptKey) -> Prompt:
        return self._sources[key.source].prompts.by_row[key.row]

    def record(self, key: PromptKey, group: Group) -> None:
        """Note what a group of this prompt did. It counts once the step ends."""
        if self._curriculum is not None:
            result = judge_group(group, self._curriculum.success)
            self._results += [] if result is None else [Result(group.index, key, result)]

    def finish_step(self) -> None:
        """Count what was noted, in the order in which the groups started."""
        for _, key, result in sorted(self._results):
            history = self._sources[key.source].history
            if history is not None:
                history.record(key.row, result)
        self._results = []

    def snapshot(self) -> FeedState:
        sources = {name: source.snapshot() for name, source in self._sources.items()}
        return FeedState(sources=sources, results=tuple(self._results))
