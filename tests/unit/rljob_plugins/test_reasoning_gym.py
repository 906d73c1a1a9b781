"""Entries of reasoning_gym's datasets."""

from __future__ import annotations

from typing import Any

from rljob_plugins.reasoning_gym import read_entry


def sample(**fields: Any) -> dict[str, Any]:
    return {"id": "1", "prompt": "2+2?", "completion": "4", **fields}


def test_column_that_describes_the_sample_itself_is_kept_in_entries() -> None:
    gym = read_entry(sample(ground_truth="4", extra_info={"question": "Two plus two?", "metadata": {"n": 1}}))
    assert gym == {"question": "Two plus two?", "answer": "4", "metadata": {"n": 1}}


def test_lists_of_an_entry_equal_the_tuples_that_a_file_cannot_keep() -> None:
    """reasoning_gym's arc_agi and rearc compare tuples."""
    rows = read_entry(sample(extra_info={"metadata": {"rows": [[2, 1], [3]]}}))["metadata"]["rows"]
    assert ((2, 1), (3,)) == rows == [[2, 1], [3]]
    assert rows != ((2, 1), (4,))
    assert isinstance(rows[0], list)
