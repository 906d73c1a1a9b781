"""Requests of Pods, as the scheduler counts them."""

import pytest

from rljob_core.plan.policy_limits import sum_requests


def container(restart=None, limits=None, **requests):
    always = {"restartPolicy": restart} if restart else {}
    return {"resources": {"requests": requests} | ({"limits": limits} if limits else {})} | always


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"containers": [container(cpu="1"), container(cpu="250m", memory="1Gi")]}, {"cpu": "1250m", "memory": "1Gi"}),
        ({"containers": [container(limits={"cpu": "2", "memory": "3Mi"}, cpu="1")]}, {"cpu": "1", "memory": "3Mi"}),
        ({"containers": [container(cpu="1")], "initContainers": [container(cpu="3")]}, {"cpu": "3"}),
        (
            {"containers": [container(cpu="1")], "initContainers": [container("Always", cpu="3"), container(cpu="2")]},
            {"cpu": "5"},
        ),
        (
            {"containers": [container(cpu="1")], "initContainers": [container(cpu="2"), container("Always", cpu="3")]},
            {"cpu": "4"},
        ),
        ({"containers": [container(cpu="1", memory="1Gi")], **container(cpu="5")}, {"cpu": "5", "memory": "1Gi"}),
        (
            {"containers": [container(**{"amd.com/gpu": "2"})], **container(cpu="5", **{"amd.com/gpu": "0"})},
            {"amd.com/gpu": "2", "cpu": "5"},
        ),
        ({"containers": [{}, container(cpu="0")]}, {}),
        ({"containers": [container(cpu="1"), {"resources": {"limits": ["x"], "requests": "x"}}]}, {"cpu": "1"}),
        ({"containers": [container(cpu="1")], "initContainers": [{"resources": [1]}], "resources": 3}, {"cpu": "1"}),
    ],
)
def test_requests_of_a_pod(spec, expected):
    assert sum_requests([(spec, 1)]) == expected


def test_pods_are_counted():
    pod = {"containers": [container(cpu="100m", memory="100", **{"nvidia.com/gpu": "1"})]}
    assert sum_requests([(pod, 3), (pod, 0)]) == {"cpu": "300m", "memory": "300", "nvidia.com/gpu": "3"}
