"""Objects of any depth: what fields of Kubernetes have stays, and nothing fails."""

import json

import pytest

from rljob_core.json_depth import MAX_DEPTH, dump_json, load_json


def nest(levels):
    return '{"a":[' * (levels // 2) + "1" + "]}" * (levels // 2)


def depth_of(value):
    depth = 0
    while isinstance(value, dict | list):
        value, depth = value["a"] if isinstance(value, dict) else value[0], depth + 1
    return depth


@pytest.mark.parametrize("levels", [2, 300, 900, 1100, 9000])
def test_any_depth_is_read_and_written(levels):
    raw = f'{{"items":[{{"a":{nest(levels)}}},{{"name":"[{{\\"\\\\"}}]}}'
    read = load_json(raw.encode())
    assert read["items"][1] == {"name": '[{"\\'}, "its neighbour is whole"
    written = json.loads(dump_json(read))
    assert written["items"][1] == read["items"][1]
    assert depth_of(written["items"][0]["a"]) >= min(levels, MAX_DEPTH - 3)


@pytest.mark.parametrize("raw", [b"", b"{", b"<html>", b'{"a":NaN}', b"]" * 300, nest(1100).encode()[:-1]])
def test_what_is_no_json_is_refused(raw):
    with pytest.raises(ValueError, match=r"malformed|truncated"):
        load_json(raw)


def test_what_is_no_value_of_json_is_refused():
    with pytest.raises(TypeError):
        dump_json({"a": object()})
