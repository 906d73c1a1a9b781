"""The prompts of training in their order, over all sources.

    mixture: which source --> its cursor: which row --> curriculum: is it due?  no: the next row
                                                                                yes: a group starts

Owns the cursors, the counts and the success seen. Invariant: the next prompt is a pure function of the seed and the
state, and the state is all that a checkpoint has. What groups did counts at the end of a step, in the order of
their start, so that a synchronous job has one order. Without a curriculum, each prompt of a source is drawn once in
each of its epochs.
"""

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
from rljob_trainer.feed.curriculum import SuccessHistory, judge_group


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
