"""Drift: when an apply would write something."""

import pytest

from rljob_core.children.difference import contains, stamp


@pytest.mark.parametrize(
    ("observed", "desired"),
    [
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"env": [{"name": "X", "value": "1"}, {"name": "injected"}]}, {"env": [{"name": "X", "value": "1"}]}),
        ({"rules": [{"port": 80, "protocol": "TCP"}]}, {"rules": [{"port": 80}]}),
        ({}, {"egress": [], "labels": {}, "value": "", "publishNotReadyAddresses": False}),
        ({"requests": {"cpu": "500m", "memory": "1Gi"}}, {"requests": {"cpu": "0.5", "memory": "1024Mi"}}),
        ({"emptyDir": {"sizeLimit": "2Gi"}}, {"emptyDir": {"sizeLimit": "2048Mi"}}),
        (
            {"volumeMounts": [{"name": "v", "mountPath": "/b"}, {"name": "v", "mountPath": "/a"}]},
            {"volumeMounts": [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]},
        ),
    ],
)
def test_additions_and_other_spellings_do_not_count_as_drift(observed, desired):
    assert contains(observed, desired)


@pytest.mark.parametrize(
    ("observed", "desired"),
    [
        (None, {"a": 1}),
        ({"a": 1}, {"a": 2}),
        ({"a": "1"}, {"a": 1}),
        ({}, {"replicas": 0}),
        ({"command": ["x", "y"]}, {"command": ["x"]}),
        ({"env": [{"name": "X", "value": "1"}]}, {"env": [{"name": "X", "value": "2"}]}),
        ({"env": []}, {"env": [{"name": "X"}]}),
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": "2"}}),
        ({"limits": {"cpu": "1"}}, {"limits": {"memory": "1Gi"}}),
        ({"sizeLimit": "1Gi"}, {"sizeLimit": "2Gi"}),
        ({"a": {"b": 1}}, {"a": [1]}),
    ],
)
def test_changed_content_counts_as_drift(observed, desired):
    assert not contains(observed, desired)


def test_stamp_finds_removed_content():
    old = {"metadata": {"name": "x"}, "spec": {"a": 1, "b": 2}}
    new = {"metadata": {"name": "x"}, "spec": {"a": 1}}
    assert contains(stamp(old), stamp(old))
    assert not contains(stamp(old), stamp(new))


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", "0.5"), (2, "2"), ("1Ki", "1024"), ("1e3", "1000"), ("2M", "2000000")],
)
def test_quantities_are_compared_by_value(text, value):
    assert contains({"limits": {"x": text}}, {"limits": {"x": value}})
    assert contains({"limits": {"x": value}}, {"limits": {"x": text}})


@pytest.mark.parametrize("text", ["x", "1Zi", None])
def test_invalid_quantity_differs_from_every_other(text):
    assert not contains({"limits": {"x": text}}, {"limits": {"x": "1"}})
    assert not contains({"limits": {"x": text}}, {"limits": {"x": "y"}})
