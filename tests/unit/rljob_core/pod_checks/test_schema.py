"""All wrong names and types of a template are found, and numbers have their bounds."""

import pytest

from rljob_core.pod_checks import find_violations


def test_all_problems_of_a_template_are_found_at_once():
    ports = [{"containerPort": "80"}]
    container = {"name": "a", "image": "a", "env": {"A": "b"}, "ports": ports, "imagepullPolicy": "x"}
    found = dict(find_violations({"metadata": {"labels": {"a": 1}}, "spec": {"containers": [container]}}))
    main = ("spec", "containers", 0)
    places = [(*main, "env"), (*main, "imagepullPolicy"), (*main, "ports", 0, "containerPort")]
    assert set(found) == {*places, ("metadata", "labels", "a")}


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
