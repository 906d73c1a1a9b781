"""The configuration files of a node: containerd, CNI and kubelet. Pure."""

from pathlib import Path
from typing import Any

from rljob_cluster.node.node import DNS_ADDRESS, LABEL_POOL, PAUSE_IMAGE, Node

_CNI_PROGRAMS = Path("/usr/lib/cni")


def build_containerd_config(node: Node) -> str:
    # restrict_oom_score_adj: without CAP_SYS_RESOURCE a container must not lower its score, or runc fails.
    return f'''version = 2
root = "{node.folder / "containerd"}"
state = "{node.socket.parent / "state"}"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
address = "{node.socket}"
[ttrpc]
address = "{node.socket}.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{_CNI_PROGRAMS}"
conf_dir = "{node.folder / "cni"}"
[plugins."io.containerd.grpc.v1.cri".containerd]
discard_unpacked_layers = false
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
'''


def build_cni_config(node: Node) -> dict[str, Any]:
    ipam = {
        "type": "host-local",
        "dataDir": str(node.folder / "ipam"),
        "ranges": [[{"subnet": f"10.244.{node.index}.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": node.bridge, "isGateway": True, "hairpinMode": True, "ipam": ipam}
    return {"cniVersion": "0.4.0", "name": node.name, "plugins": [bridge]}


def build_kubelet_config(node: Node, ca: Path) -> dict[str, Any]:
    taint = {"key": LABEL_POOL, "value": node.pool, "effect": "NoSchedule"}
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "port": 10250,
        "healthzBindAddress": node.address,
        "healthzPort": 10248,
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.name}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(ca)},
        },
        "authorization": {"mode": "AlwaysAllow"},  # for every client with a certificate of the cluster's CA
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 99,
        "imageGCLowThresholdPercent": 98,
        "makeIPTablesUtilChains": False,
        "podLogsDir": str(node.folder / "logs"),
        "volumePluginDir": str(node.folder / "kubelet/plugins"),
        "nodeStatusUpdateFrequency": "5s",
        "serializeImagePulls": False,
        "registerWithTaints": [taint] if node.is_tainted else [],
    }
