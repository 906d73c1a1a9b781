"""What functions get from a sample."""

from typing import Any

import pytest

from rljob_reward.worker.adapters import values
from rljob_reward.worker.adapters.values import reader_of

CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]


def sample(**fields: Any) -> dict[str, Any]:
    return {"id": "1", "prompt": "2+2?", "completion": "4", **fields}


def value_of(name: str, row: dict[str, Any]) -> Any:
    return reader_of(name)(row)


def test_prompt_text_joins_the_contents_of_a_chat_as_lines() -> None:
    assert values.prompt_text(sample()) == "2+2?"
    assert values.prompt_text(sample(prompt=CHAT)) == "Be short.\n2+2?"
    assert values.prompt_text(sample(prompt=[{"role": "assistant", "content": None}])) == ""


def test_column_may_be_nested_or_have_a_dot_in_its_name() -> None:
    row = sample(extra_info={"a": {"b": 1, "c.d": 2}, "e.f": 3, "e": {"f": 4}})
    names = ("extra_info.a.b", "extra_info.a.c.d", "extra_info.e.f")
    assert [value_of(name, row) for name in names] == [1, 2, 3]


@pytest.mark.parametrize("name", ["extra_info.x", "extra_info.a.x", "extra_info.a.b.c"])
def test_missing_column_names_those_that_the_row_has(name: str) -> None:
    with pytest.raises(KeyError, match=r"the row has only (a|b)"):
        value_of(name, sample(extra_info={"a": {"b": 1}}))


def test_column_that_describes_the_sample_itself_is_kept_in_entries() -> None:
    gym = value_of("entry", sample(ground_truth="4", extra_info={"question": "Two plus two?", "metadata": {"n": 1}}))
    assert gym == {"question": "Two plus two?", "answer": "4", "metadata": {"n": 1}}


def test_fields_with_defaults_may_be_missing() -> None:
    for name in set(values.VALUES) - {"prompt_ids", "completion_ids", "sample"}:
        value_of(name, sample())
