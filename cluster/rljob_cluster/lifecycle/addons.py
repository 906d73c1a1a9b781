"""What every cluster has beside its nodes: CoreDNS as a Deployment, and claims backed by folders of this machine."""

from __future__ import annotations

from typing import Any

from rljob_cluster.node.node import DNS_ADDRESS, LABEL_POOL

COREDNS_IMAGE = "rljob.dev/coredns:local"
Manifest = dict[str, Any]
_DNS_PORT = 1053
_COREFILE = f"""
.:{_DNS_PORT} {{
    errors
    health :8080
    ready :8181
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        ttl 2
    }}
    forward . /etc/resolv.conf
    cache 2
}}
"""


def build_coredns() -> list[Manifest]:
    """Answers live two seconds: headless Services change with every Pod."""
    name = {"name": "coredns", "namespace": "kube-system"}
    labels = {"k8s-app": "kube-dns"}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "system:coredns"},
            "rules": [
                {
                    "apiGroups": [""],
                    "resources": ["endpoints", "services", "pods", "namespaces"],
                    "verbs": ["list", "watch"],
                },
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "system:coredns"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"},
            "subjects": [{"kind": "ServiceAccount", **name}],
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": name, "data": {"Corefile": _COREFILE}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
            "spec": {
                "clusterIP": DNS_ADDRESS,
                "selector": labels,
                "ports": [
                    {"name": "dns", "port": 53, "targetPort": _DNS_PORT, "protocol": "UDP"},
                    {"name": "dns-tcp", "port": 53, "targetPort": _DNS_PORT, "protocol": "TCP"},
                ],
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": name,
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": _coredns_pod()},
            },
        },
    ]


def _coredns_pod() -> Manifest:
    return {
        "serviceAccountName": "coredns",
        "nodeSelector": {LABEL_POOL: "system"},
        "dnsPolicy": "Default",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532},
        "containers": [
            {
                "name": "coredns",
                "image": COREDNS_IMAGE,
                "imagePullPolicy": "Never",
                "args": ["-conf", "/etc/coredns/Corefile"],
                "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
            }
        ],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }


def build_volume(name: str, namespace: str, folder: str) -> list[Manifest]:
    """A ReadWriteMany claim that is a folder of this machine, which all nodes are. Bound at once."""
    volume = f"{namespace}-{name}"
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": spec
            | {
                "capacity": {"storage": "100Gi"},
                "hostPath": {"path": folder, "type": "Directory"},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"name": name, "namespace": namespace},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec | {"volumeName": volume, "resources": {"requests": {"storage": "100Gi"}}},
        },
    ]
