"""A prompt: one row of the data, as the model and the rewards receive it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rljob_api.wire.protocol import Message


@dataclass(frozen=True)
class Prompt:
    index: int
    """Row in its dataset."""
    prompt: str | list[Message]
    """What the model gets, before tokenization."""
    token_ids: list[int]
    ground_truth: Any = None
    data_source: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Other columns, index and split."""
