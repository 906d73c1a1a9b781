"""Episodes, groups and rows for tests."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from rljob_trainer.episodes.types import NOT_SAMPLED, Episode, Segment, Turn


def episode(
    token_ids: list[int] | None = None,
    loss_mask: list[int] | None = None,
    *,
    logprobs: list[float] | None = None,
    text: str = "",
    truncated: bool = False,
    version: int = 0,
    index: tuple[int, int, int] = (0, 0, 0),
    **fields: Any,
) -> Episode:
    """Return an episode of one turn. `index`: prompt, group, sample."""
    token_ids = [1, 2] if token_ids is None else token_ids
    loss_mask = [0, *[1] * (len(token_ids) - 1)] if loss_mask is None else loss_mask
    segment = Segment(
        token_ids,
        loss_mask,
        logprobs or [-1.0 * mask for mask in loss_mask],
        [version if mask else NOT_SAMPLED for mask in loss_mask],
        [0 if mask else NOT_SAMPLED for mask in loss_mask],
    )
    return Episode(*index, [segment], [Turn(text, truncated)], "g", **fields)


def listed(segments: Iterable[Segment]) -> list[SimpleNamespace]:
    """Return segments whose arrays are lists, to compare."""
    return [SimpleNamespace(**{name: values.tolist() for name, values in vars(each).items()}) for each in segments]
