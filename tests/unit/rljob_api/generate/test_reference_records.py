"""Tables of a run's records."""

from __future__ import annotations

import pytest

from rljob_api.generate.reference import build_column_table, build_evaluation_table, build_step_table
from rljob_api.run.gauges import list_numbers
from rljob_api.run.metrics import EvaluationRecord, StepRecord
from rljob_api.run.trajectories import SampleRow

TABLES = {"step": build_step_table(), "evaluation": build_evaluation_table(), "columns": build_column_table()}


def test_each_value_is_in_a_table_once_with_its_meaning() -> None:
    paths = {number.path: number.path.replace("*", number.label.upper()) for number in list_numbers(StepRecord)}
    for path in paths.values():
        [row] = [line for line in TABLES["step"].splitlines() if line.startswith(f"| `{path}` |")]
        assert len(row.split(" | ")[2]) > 5, row
    for number in list_numbers(EvaluationRecord):
        assert number.path in paths or f"| `{number.path}` |" in TABLES["evaluation"]
    for name in SampleRow.model_fields:
        assert f"| `{name}` |" in TABLES["columns"]


def test_units_are_those_of_the_types() -> None:
    for row in (
        "| `phase_seconds` | s | The driver's time within the step, by phase. |",
        "| `agent/tools/TOOL/errors` | count | Those without a result. |",
    ):
        assert row in TABLES["step"].splitlines()
    assert "| `rewards[].components` | map of numbers |" in TABLES["columns"]


@pytest.mark.parametrize("name", TABLES)
def test_rows_have_the_cells_of_the_head(name: str) -> None:
    head, *rows = TABLES[name].replace("\\|", "").splitlines()
    assert {row.count("|") for row in rows} == {head.count("|")}
