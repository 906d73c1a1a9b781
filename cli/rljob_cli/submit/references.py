"""What a job's Pods need from the namespace: Secrets, ConfigMaps and claims that must exist before. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rljob_cli.manifests import containers_of
from rljob_core.backend import Manifest

_POD_WORKLOADS = ("Job", "StatefulSet", "Deployment")
_REMEDIES = {
    "Secret": "kubectl create secret generic {name} -n {namespace} --from-literal={key}=...",
    "ConfigMap": "kubectl create configmap {name} -n {namespace} --from-file={key}=...",
    "PersistentVolumeClaim": "create the claim, or use one that exists: kubectl get pvc -n {namespace}",
}


class Need(NamedTuple):
    """An object, or a key in it (empty: any), that a Pod refers to."""

    kind: str
    name: str
    key: str = ""

    def describe_missing(self, namespace: str) -> str:
        remedy = _REMEDIES[self.kind].format(name=self.name, namespace=namespace, key=self.key or "KEY")
        has_no = f" with the key {self.key}" if self.key else ""
        return f"{self.kind} {namespace}/{self.name}{has_no} does not exist; {remedy}"


def find_needs(children: Iterable[Manifest], provided: Iterable[Manifest]) -> list[Need]:
    """Return what the Pods of `children` need and neither `children` nor `provided` contain."""
    children = list(children)
    ours = {(m["kind"], m["metadata"]["name"]) for m in [*children, *provided]}
    pods = [child["spec"]["template"]["spec"] for child in children if child["kind"] in _POD_WORKLOADS]
    needs = {need for pod in pods for need in _list_needs(pod)}
    return sorted(need for need in needs if (need.kind, need.name) not in ours)


def _list_needs(pod: Mapping[str, Any]) -> Iterator[Need]:
    for container in containers_of(pod):
        for env in container.get("env") or []:
            yield from _list_key_needs(env.get("valueFrom") or {}, "secretKeyRef", "configMapKeyRef")
        for env in container.get("envFrom") or []:
            yield from _list_key_needs(env, "secretRef", "configMapRef")
    for secret in pod.get("imagePullSecrets") or []:
        yield Need("Secret", secret["name"])
    for volume in pod.get("volumes") or []:
        yield from _list_volume_needs(volume)


def _list_key_needs(source: Mapping[str, Any], secret: str, config_map: str) -> Iterator[Need]:
    for field, kind in ((secret, "Secret"), (config_map, "ConfigMap")):
        reference = source.get(field)
        if reference and not reference.get("optional"):
            yield Need(kind, reference["name"], reference.get("key", ""))


def _list_volume_needs(volume: Mapping[str, Any]) -> Iterator[Need]:
    for source in (volume.get("projected") or {}).get("sources") or []:
        yield from _list_volume_needs(source)
    for field, kind in (("secret", "Secret"), ("configMap", "ConfigMap")):
        source = volume.get(field)
        if source and not source.get("optional"):
            name = source.get("secretName") or source["name"]
            yield from (Need(kind, name, item["key"]) for item in source.get("items") or [])
            if not source.get("items"):
                yield Need(kind, name)
    if claim := volume.get("persistentVolumeClaim"):
        yield Need("PersistentVolumeClaim", claim["claimName"])


def is_missing(need: Need, found: Manifest | None) -> bool:
    """Whether the object (None: it does not exist) lacks what is needed."""
    if found is None:
        return True
    keys = {*(found.get("data") or {}), *(found.get("binaryData") or {})}
    return bool(need.key) and need.key not in keys
