"""Manifests of what every cluster contains in addition to its nodes: CoreDNS, and claims on folders of this machine."""

from pathlib import Path
from typing import Any

import yaml

COREDNS_IMAGE = "rljob.dev/coredns:local"
Manifest = dict[str, Any]


def build_coredns() -> list[Manifest]:
    return list(yaml.safe_load_all(Path(__file__).with_name("coredns.yaml").read_text()))


def build_volume(name: str, namespace: str, folder: str) -> list[Manifest]:
    """A ReadWriteMany claim, bound to a folder of this machine, which all nodes share."""
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
