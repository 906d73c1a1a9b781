"""The administrator's access to a test's namespace: it passes no proxy and no operator."""

from __future__ import annotations

import json
from typing import Any

from kubernetes import client, dynamic

Manifest = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"
API_VERSIONS = {
    "Secret": "v1",
    "ConfigMap": "v1",
    "Service": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "Job": "batch/v1",
    "StatefulSet": "apps/v1",
    "Deployment": "apps/v1",
    "Pod": "v1",
    "RLJob": "rljob.dev/v1alpha1",
    "RewardModel": "rljob.dev/v1alpha1",
}
CHILD_KINDS = tuple(API_VERSIONS)[:8]


class AdminClient:
    """Reads and changes objects of one namespace."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._dynamic, self.namespace, self.core = dynamic.DynamicClient(api), namespace, client.CoreV1Api(api)

    def resource(self, kind: str) -> Any:
        return self._dynamic.resources.get(api_version=API_VERSIONS[kind], kind=kind)

    def find(self, kind: str, name: str) -> Manifest | None:
        try:
            return self.resource(kind).get(name=name, namespace=self.namespace).to_dict()  # type: ignore[no-any-return]
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: str) -> list[Manifest]:
        answer = self.resource(kind).get(namespace=self.namespace, serialize=False)
        # Items of a typed list have no kind and apiVersion.
        return [item | {"kind": kind, "apiVersion": API_VERSIONS[kind]} for item in json.loads(answer.data)["items"]]

    def children(self) -> dict[tuple[str, str], Manifest]:
        """Return all objects of the operator's kinds by kind and name, except for those of every namespace."""
        found = [child for kind in CHILD_KINDS for child in self.list(kind)]
        return {(o["kind"], o["metadata"]["name"]): o for o in found if o["metadata"]["name"] != "kube-root-ca.crt"}

    def create(self, body: Manifest) -> Manifest:
        return self.resource(body["kind"]).create(body=body, namespace=self.namespace).to_dict()  # type: ignore[no-any-return]

    def replace(self, body: Manifest) -> Manifest:
        return self.resource(body["kind"]).replace(body=body, namespace=self.namespace).to_dict()  # type: ignore[no-any-return]

    def patch(self, kind: str, name: str, change: Manifest) -> None:
        self.resource(kind).patch(name=name, body=change, namespace=self.namespace, content_type=MERGE_PATCH)

    def patch_status(self, kind: str, name: str, status: Manifest) -> None:
        call = self.resource(kind).status.patch
        call(name=name, body={"status": status}, namespace=self.namespace, content_type=MERGE_PATCH)

    def delete(self, kind: str, name: str, policy: str = "Background", **options: Any) -> None:
        body = {"propagationPolicy": policy, **options}
        self.resource(kind).delete(name=name, namespace=self.namespace, body=body)


def owner_uids(manifest: Manifest) -> set[str]:
    return {ref["uid"] for ref in manifest["metadata"].get("ownerReferences") or []}
