"""Names of plugins and what they refer to."""

from __future__ import annotations

import json

import pytest

from rljob_api.functions.plugins import describe_unknown, load_reference


def test_reference_is_a_module_or_what_it_defines() -> None:
    assert load_reference("json") is json
    assert load_reference("json:loads") is json.loads
    with pytest.raises(AttributeError):
        load_reference("json:load_all")


def test_unknown_name_has_those_that_are_known_and_the_nearest() -> None:
    known = ["gymnasium", "trl"]
    assert describe_unknown("gymnasim", known) == (
        "gymnasim is not installed; known are gymnasium, trl; did you mean gymnasium?"
    )
    assert describe_unknown("x", []) == "x is not installed; known are none; install the package of its plugin"
