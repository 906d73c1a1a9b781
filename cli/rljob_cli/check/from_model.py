"""What a job leaves to its model, as lines for people: field, value, and the file that says so. Pure."""

from collections.abc import Sequence
from typing import Any

from rljob_inputs.models.defaults import FromModel

TITLE = "from the model's files:"


def describe_from_model(values: Sequence[FromModel]) -> list[str]:
    """Return a title and one line per setting, in columns; empty without settings."""
    if not values:
        return []
    rows = [(each.field, _clean(_show(each.value)), _clean(each.source)) for each in values]
    field_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [TITLE, *(f"  {field:{field_width}}  {value:{value_width}}  {source}" for field, value, source in rows)]


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_show(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _clean(text: str) -> str:
    """Replace what a terminal would obey: names of tokens come from the model's files."""
    return "".join(character if character.isprintable() else " " for character in text)
