"""The rows of the trajectory log."""

from rljob_api.run.trajectories import ResultRow, SampleRow
from tests.support.records import sample_row


def test_row_is_the_same_after_a_round_trip():
    turn = {"text": "a", "tool_calls": [{"id": "0", "name": "add"}]}
    segment = {"num_tokens": 2, "spans": [{"start": 0, "end": 2, "turn": -1}]}
    result = {"name": "r", "valid": True, "score": 1.0, "components": {"exact": 1.0}}
    row = sample_row(rewards=[result], turns=[turn], segments=[segment])
    assert SampleRow.model_validate(row.model_dump()) == row
    assert (row.rewards[0].components, row.turns[0].tool_calls[0].name) == ({"exact": 1.0}, "add")


def test_unknown_columns_are_ignored_and_missing_ones_are_null():
    row = SampleRow.model_validate(sample_row().model_dump(exclude={"end", "turns", "rewards"}) | {"new": 1})
    assert (row.end, row.turns, row.rewards) == (None, None, [])
    assert sample_row(rewards=None).rewards == [], "a list that Parquet has as null"


def test_map_of_parquet_is_a_list_of_pairs():
    result = {"name": "r", "valid": True, "score": 1.0}
    assert ResultRow(**result, components=[("exact", 1.0)]).components == {"exact": 1.0}
    assert ResultRow(**result, components=None).components == {}
