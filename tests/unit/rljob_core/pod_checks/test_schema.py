"""Kubernetes' schema of Pod templates is loaded once."""

import pytest

from rljob_core.pod_checks import find_violations, schema


def test_template_is_checked_once(monkeypatch):
    template = {"spec": {"containers": [{"name": "once", "image": "once:1"}]}}
    assert find_violations(template) == ()
    monkeypatch.setattr(schema, "_load", lambda: None)
    assert find_violations(template) == ()


def test_all_problems_of_a_template_are_found_at_once():
    container = {"name": "a", "image": "a", "env": {"A": "b"}, "ports": [{"containerPort": 0}], "imagepullPolicy": "x"}
    found = dict(find_violations({"metadata": {"labels": {"a b": "c"}}, "spec": {"containers": [container]}}))
    main = ("spec", "containers", 0)
    places = [(*main, "env"), (*main, "imagepullPolicy"), (*main, "ports", 0, "containerPort")]
    assert set(found) == {*places, ("metadata", "labels", "a b")}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**31 - 1, None),
        (2**31, "must be at most 2147483647, got 2147483648"),
        (-(2**31), None),
        (-(2**31) - 1, "must be at least -2147483648, got -2147483649"),
    ],
)
def test_whole_numbers_have_32_bits(value, message):
    found = dict(find_violations({"spec": {"containers": [{"name": "a", "image": "a"}], "priority": value}}))
    assert found.get(("spec", "priority")) == message
