"""A prompt: one row of the data, as the model and the rewards receive it."""

from dataclasses import dataclass, field
from typing import Any

from rljob_api.wire.base import Message


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
    """Other columns, index and split. They include the prompt's own column unless its name is prompt: a template and
    chat messages change its text."""
    source: str = ""
    """Name of its source, if the job's metrics tell sources apart."""
    answer_column: str = ""
    """Name of the column with the ground truth; empty without one, or if it is a part of a column."""
