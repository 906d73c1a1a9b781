"""Which bodies are samples, which cost one sample, and which are malformed."""

from __future__ import annotations

import json

import pytest

from rljob_api.wire.calls import CallRequest
from rljob_api.wire.scores import GroupRequest, ScoreRequest
from rljob_service.server.bodies import MalformedError, Unscorable, parse

SURROGATE = "\ud83d"
"""Half a pair, as a truncated text may end."""


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def sample(name: str = "a", **fields: object) -> dict[str, object]:
    return {"id": name, "prompt": "p", "completion": "c", **fields}


@pytest.mark.parametrize(
    "odd",
    [
        {"completion": SURROGATE},
        {"prompt": [{"role": "user", "content": SURROGATE}]},
        {"extra_info": {"x": nested(300)}},
        {"ground_truth": nested(300)},
        {"extra_info": {SURROGATE: 1}},
    ],
)
def test_data_that_cannot_be_read_costs_its_sample_or_its_group(odd: dict[str, object]) -> None:
    result = parse(ScoreRequest, json.dumps(sample(**odd, lane="eval")).encode())
    assert isinstance(result, Unscorable)
    assert (result.request_id, result.lane, result.sample_ids) == ("a", "eval", ["a"])
    assert "Invalid JSON" in result.problem
    group = parse(GroupRequest, json.dumps({"id": "g", "samples": [sample("a"), sample("b", **odd)]}).encode())
    assert isinstance(group, Unscorable)
    assert (group.request_id, group.sample_ids) == ("g", ["a", "b"])
    call = parse(CallRequest, json.dumps({"id": "c", "function": "f", "arguments": {"x": odd}}).encode())
    assert isinstance(call, Unscorable)
    assert (call.request_id, call.sample_ids, call.kind) == ("c", ["c"], CallRequest)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "body: Invalid JSON"),
        (b"{", "body: Invalid JSON"),
        (b"[" * 100_000, "body: Invalid JSON"),
        (json.dumps({"completion": SURROGATE}).encode(), "body: Invalid JSON"),
        (json.dumps(sample(SURROGATE)).encode(), "body: Invalid JSON"),
        (json.dumps(sample("a" * 257, completion=SURROGATE)).encode(), "body: Invalid JSON"),
        (json.dumps(sample(lane="fast", completion=SURROGATE)).encode(), "body: Invalid JSON"),
        (json.dumps([SURROGATE]).encode(), "body: Invalid JSON"),
        (json.dumps({"id": "a", "prompt": "p"}).encode(), "completion: Field required"),
        (json.dumps(sample(unknown=1)).encode(), "unknown: Extra inputs"),
    ],
)
def test_body_that_breaks_the_protocol_is_malformed(body: bytes, expected: str) -> None:
    with pytest.raises(MalformedError, match=expected):
        parse(ScoreRequest, body)


def test_good_body_is_parsed() -> None:
    assert parse(ScoreRequest, json.dumps(sample()).encode()) == ScoreRequest(id="a", prompt="p", completion="c")
