"""What functions get from a sample."""

from typing import Any

import pytest

from rljob_api.functions import values
from rljob_api.functions.values import Value, find_column
from tests.support.plugins import KNOWN

CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]


def sample(**fields: Any) -> dict[str, Any]:
    return {"id": "1", "prompt": "2+2?", "completion": "4", **fields}


def test_prompt_text_joins_the_contents_of_a_chat_as_lines() -> None:
    assert values.read_prompt_text(sample()) == "2+2?"
    assert values.read_prompt_text(sample(prompt=CHAT)) == "Be short.\n2+2?"
    assert values.read_prompt_text(sample(prompt=[{"role": "assistant", "content": None}])) == ""


def test_column_may_be_nested_or_have_a_dot_in_its_name() -> None:
    row = sample(extra_info={"a": {"b": 1, "c.d": 2}, "e.f": 3, "e": {"f": 4}})
    names = ("extra_info.a.b", "extra_info.a.c.d", "extra_info.e.f")
    assert [find_column(name).read(row) for name in names] == [1, 2, 3]


@pytest.mark.parametrize("name", ["extra_info.x", "extra_info.a.x", "extra_info.a.b.c"])
def test_missing_column_names_those_that_the_row_has(name: str) -> None:
    with pytest.raises(KeyError, match=r"the row has only (a|b)"):
        find_column(name).read(sample(extra_info={"a": {"b": 1}}))


def test_fields_with_defaults_may_be_missing() -> None:
    given = [value for value in vars(values).values() if isinstance(value, Value)]
    given += [value for convention in KNOWN.conventions for value in convention.arguments.values()]
    for value in given:
        if not value.part and value.name != "reward_input":  # its length is that of the token ids
            value.read(sample())
