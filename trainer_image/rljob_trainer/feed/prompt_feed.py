"""The prompts of training in their order, over all sources.

    mixture: which source --> its cursor: which row --> curriculum: is it due?  no: the next row
                                                                                yes: a group starts

Owns the cursors, the counts and the success seen. Invariant: the next prompt is a pure function of the seed and the
state, and the state is all that a checkpoint has. What groups did counts at the end of a step, in the order of
their start, so that a synchronous job has one order. Without a curriculum, each prompt of a source is drawn once in
each of its epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from rljob_api.manifest.job_sections import Curriculum
from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Group
from rljob_trainer.feed.curriculum import SuccessHistory, judge_group
from rljob_trainer.feed.cursor import Cursor, EpochReader


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
