"""The termination message of a program."""

import json

import pytest

from rljob_api.wire.termination import RESULT_PREFIX, leave_result


@pytest.mark.parametrize("num_items", [0, 2, 200])
def test_result_is_valid_json_within_what_kubernetes_keeps(num_items, tmp_path, monkeypatch):
    path = tmp_path / "log"
    monkeypatch.setenv("RLJOB_TERMINATION_LOG", str(path))
    items = [json.dumps({"set": "é" * 20, "name": str(index)}) for index in range(num_items)]
    num_left_out = leave_result(items)
    text = path.read_text()
    assert len(text.encode()) <= 4096
    found = json.loads(text.removeprefix(RESULT_PREFIX))
    assert [each["name"] for each in found] == [str(index) for index in range(len(found))], "the first ones"
    assert len(found) == num_items or len(found) > 10
    assert num_left_out == num_items - len(found), "the caller can say so"
