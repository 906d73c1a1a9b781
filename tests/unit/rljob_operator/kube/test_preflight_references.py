import pytest

from rljob_core.backend import Reference
from rljob_operator.kube.preflight import find_references


def build(**spec):
    return {"metadata": {"ownerReferences": [{"name": "gsm8k"}]}, "spec": {"template": {"spec": spec}}}


def env(**source):
    return {"containers": [{"env": [{"name": "A", "value": "b"}, {"name": "B", "valueFrom": source}]}]}


def volume(**source):
    return {"volumes": [{"name": "x", **source}]}


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (env(secretKeyRef={"name": "key", "key": "k"}), ["Secret key"]),
        (env(configMapKeyRef={"name": "key", "key": "k"}), ["ConfigMap key"]),
        (env(secretKeyRef={"name": "key", "key": "k", "optional": True}), []),
        (env(fieldRef={"fieldPath": "metadata.name"}), []),
        ({"initContainers": [{"envFrom": [{"secretRef": {"name": "all"}}, {"configMapRef": {"name": "b"}}]}]}, None),
        (volume(secret={"secretName": "key"}), ["Secret key"]),
        (volume(configMap={"name": "key"}), ["ConfigMap key"]),
        (volume(persistentVolumeClaim={"claimName": "gsm8k-runs"}), ["PersistentVolumeClaim gsm8k-runs"]),
        (volume(persistentVolumeClaim=1), []),
        (volume(projected={"sources": [{"secret": {"name": "a"}}, {"configMap": {"name": "b"}}]}), None),
        (volume(emptyDir={}), []),
        (volume(secret={"secretName": "gsm8k-token"}), []),
        (volume(secret={"secretName": "judge-rewardmodel"}), []),
        ({"volumes": "x", "containers": [1, {"env": {}, "envFrom": [None, {"secretRef": 1}]}]}, []),
        (
            {
                "containers": [{"env": ["x", {"valueFrom": {"secretKeyRef": {"name": {}}}}]}],
                "volumes": [{"secret": []}],
            },
            [],
        ),
        ({"imagePullSecrets": [{"name": "registry"}]}, []),
        (env(secretKeyRef={"name": "key", "key": "k"}) | volume(csi={"driver": "secrets-store.csi.k8s.io"}), []),
        (env(configMapKeyRef={"name": "key", "key": "k"}) | volume(csi={"driver": "d"}), ["ConfigMap key"]),
        (env(secretKeyRef={"name": "key", "key": "k"}) | volume(csi=None), ["Secret key"]),
    ],
)
def test_what_pods_cannot_start_without(spec, found):
    expected = ["Secret all", "ConfigMap b"] if "initContainers" in spec else ["Secret a", "ConfigMap b"]
    names = [f"{each.kind} {each.name}" for each in find_references(build(**spec))]
    assert names == (expected if found is None else found)


def test_each_is_named_once():
    both = env(secretKeyRef={"name": "key", "key": "k"}) | volume(secret={"secretName": "key"})
    assert find_references(build(**both)) == [Reference("Secret", "key")]
