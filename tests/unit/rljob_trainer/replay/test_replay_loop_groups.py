"""Recorded groups, as the updates of a step take them."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Group, TrainedAs
from rljob_trainer.replay.program import RecordedGroups


def build_groups(parts: list[int]) -> list[Group]:
    """Return groups of one mini-batch in parts of these sizes."""
    places = [(part, size) for part, count in enumerate(parts) for size in range(count)]
    return [
        Group(100 - position, Prompt(0, "", []), [], TrainedAs(0, part, position))
        for position, (part, _) in enumerate(places)
    ]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
async def test_each_group_is_taken_once_in_order_and_no_call_mixes_parts(parts: list[int], data: st.DataObject) -> None:
    groups = build_groups(parts)
    source, taken = RecordedGroups(groups), list[list[Group]]()
    while (missing := len(groups) - sum(map(len, taken))) > 0:
        limit = data.draw(st.integers(1, missing))
        taken.append(await source.take(limit))
        assert 0 < len(taken[-1]) <= limit
        assert await source.take(missing, wait_seconds=0.1) == [], "the next part was another call of the trainer"
    assert [group for part in taken for group in part] == groups
    assert all(len({group.trained_as.part for group in part if group.trained_as}) == 1 for part in taken)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
async def test_without_a_smaller_limit_calls_are_those_of_the_run(parts: list[int]) -> None:
    groups = build_groups(parts)
    source = RecordedGroups(groups)
    taken = [await source.take(len(groups)) for _ in parts]
    assert taken == [list(part) for _, part in groupby(groups, key=lambda group: group.trained_as.part)]  # type: ignore[union-attr]
