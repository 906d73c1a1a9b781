"""The comparison of two records of the same updates."""

import copy

import pytest

from dev.guard import compare

RECORD = {
    "bounded": {
        "steps": [{"loss": -0.5, "weight_digest": "a"}],
        "samples": [{"token_ids": [1, 2], "advantage": 0.25}],
        "export": {"model.safetensors": "b"},
    }
}


def test_equal_records_have_no_difference():
    assert compare(RECORD, copy.deepcopy(RECORD)) == []


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda found: found["samples"][0].update(advantage=0.25000000000000006), "bounded.samples[0].advantage"),
        (lambda found: found["samples"][0]["token_ids"].append(3), "bounded.samples[0].token_ids"),
        (lambda found: found["steps"][0].update(weight_digest="c"), "bounded.steps[0].weight_digest"),
        (lambda found: found["steps"].pop(), "bounded.steps"),
        (lambda found: found["export"].clear(), "bounded.export"),
    ],
)
def test_first_difference_is_named(change, difference):
    after = copy.deepcopy(RECORD)
    change(after["bounded"])
    (line,) = compare(RECORD, after)
    assert line.startswith(f"{difference}: expected")
