"""GPUs of a Pod."""

from __future__ import annotations

from rljob_cli.local.node.gpus import count_gpus


def test_count_gpus_includes_sidecars_and_no_other_init_containers():
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    pod = {"spec": {"containers": [{}], "initContainers": [gpu | {"restartPolicy": "Always"}, gpu]}}
    assert count_gpus(pod) == 2
