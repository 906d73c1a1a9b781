"""reasoning_gym: score_answer of an entry of a dataset, as a function or as the method of a dataset."""

from __future__ import annotations

from typing import Any, Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin
from rljob_api.functions.values import Sample, Value


class _Array(list[Any]):
    """A list that equals a tuple of the same elements: a file does not say which of them it was."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return tuple(self) == other if isinstance(other, tuple) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def read_entry(sample: Sample) -> dict[str, Any]:
    """Return an entry. The datasets have the columns question, answer and metadata, whose tuples are lists in every
    file."""
    entry = {"metadata": {}} | values.read_row(sample) | {"answer": sample.get("ground_truth")}
    return {name: _with_arrays(value) for name, value in entry.items()}


def _with_arrays(value: Any) -> Any:
    if isinstance(value, list):
        return _Array(map(_with_arrays, value))
    return {name: _with_arrays(each) for name, each in value.items()} if isinstance(value, dict) else value


SIGNATURE: Final = SignaturePlugin(
    conventions=(
        Convention(
            "reasoningGym",
            "score_answer(answer, entry)",
            ("answer", "entry"),
            {"answer": values.COMPLETION, "entry": Value("entry", read_entry)},
            method="score_answer",
        ),
    )
)
