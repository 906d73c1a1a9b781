from pathlib import Path

import pytest

from rljob_cluster.node.config import build_cni_config, build_containerd_config, build_kubelet_config
from rljob_cluster.node.node import Node


@pytest.mark.parametrize(("pool", "taints"), [("system", []), ("reward", ["reward"])])
def test_all_nodes_except_the_system_node_are_tainted(pool: str, taints: list[str], tmp_path: Path) -> None:
    config = build_kubelet_config(Node(0, pool, tmp_path), tmp_path / "ca.crt")
    assert [taint["value"] for taint in config["registerWithTaints"]] == taints


def test_nodes_share_no_address_folder_socket_or_cgroup(tmp_path: Path) -> None:
    first, second = (Node(index, pool, tmp_path) for index, pool in enumerate(("trainer", "rollout")))
    for name in ("address", "bridge", "folder", "name", "socket"):
        assert getattr(first, name) != getattr(second, name)
    (bridge,) = build_cni_config(second)["plugins"]
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.244.1.0/24"}]]
    assert build_kubelet_config(second, tmp_path)["cgroupRoot"] == "/rljob-rollout"
    assert f'address = "{second.socket}"' in build_containerd_config(second)
