"""What a job leaves to its model, as lines for people: field, value, and the file that says so. Pure.

And of env:// sources, whose rows are known once the job runs.
"""

from collections.abc import Sequence
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_inputs.models.defaults import FromModel

_WITHOUT_ROWS = ", and no function is called without a row: `rljob test-agent` does"


def describe_unread(job: RLJob) -> list[str]:
    """Return a line for each source whose rows are not known before the job runs."""
    return [
        f"{path}: {source.source}: rows of the agent, read when the job starts; their columns and lengths are not "
        f"checked here{_WITHOUT_ROWS if path == 'spec.data.train' else ''}"
        for path, source in job.spec.env_sources.items()
    ]


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
