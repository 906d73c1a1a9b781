"""What the Pods of a job need from the namespace."""

from __future__ import annotations

import pytest

from rljob_api.manifest.job import RLJob
from rljob_cli.submit.command import Need, find_needs, is_missing
from rljob_core.plan.job import render_children


def make_job(**spec):
    endpoint = {"url": "https://x/v1", "model": "m", "apiKeySecretRef": {"name": "openai", "key": "OPENAI_API_KEY"}}
    judge = {"endpoint": endpoint, "template": "{{ completion }}", "parser": {"regex": "(\\d)"}}
    function = {"configMapKeyRef": {"name": "code", "key": "reward.py"}}
    spec = {
        "model": {"source": "hf://org/model"},
        "data": {"train": {"source": "pvc://rows/train.jsonl"}},
        "rewards": [{"name": "judge", "judge": judge}, {"name": "code", "function": function}],
    } | spec
    return RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "sums"}, "spec": spec}
    )


def test_needs_are_what_the_pods_refer_to_and_the_job_does_not_create():
    assert find_needs(render_children(make_job(), "token"), []) == [
        Need("ConfigMap", "code", "reward.py"),
        Need("PersistentVolumeClaim", "rows"),
        Need("Secret", "openai", "OPENAI_API_KEY"),
    ]


def test_provided_objects_are_not_needed():
    code = {"kind": "ConfigMap", "metadata": {"name": "code"}}
    assert "code" not in [need.name for need in find_needs(render_children(make_job(), "token"), [code])]


@pytest.mark.parametrize(
    ("added", "needs"),
    [
        ({"imagePullSecrets": [{"name": "registry"}]}, [Need("Secret", "registry")]),
        ({"volumes": [{"name": "v", "secret": {"secretName": "s"}}]}, [Need("Secret", "s")]),
        ({"volumes": [{"name": "v", "secret": {"secretName": "s", "optional": True}}]}, []),
        ({"containers": [{"name": "head", "envFrom": [{"secretRef": {"name": "s"}}]}]}, [Need("Secret", "s")]),
        ({"containers": [{"name": "head", "envFrom": [{"configMapRef": {"name": "c"}}]}]}, [Need("ConfigMap", "c")]),
    ],
)
def test_needs_of_a_template_are_found(added, needs):
    job = make_job(head={"template": {"spec": added}})
    plain = find_needs(render_children(make_job(), "token"), [])
    assert [n for n in find_needs(render_children(job, "token"), []) if n not in plain] == needs


@pytest.mark.parametrize(
    ("found", "missing"),
    [(None, True), ({"data": {"a": "x"}}, False), ({"binaryData": {"a": "x"}}, False), ({"data": {"b": "x"}}, True)],
)
def test_need_is_missing_without_the_object_or_its_key(found, missing):
    assert is_missing(Need("Secret", "s", "a"), found) is missing


def test_missing_secret_is_described_with_the_command_that_creates_it():
    message = Need("Secret", "openai", "KEY").describe_missing("team")
    assert message == (
        "Secret team/openai with the key KEY does not exist; "
        "kubectl create secret generic openai -n team --from-literal=KEY=..."
    )
