"""The local folders of volumes."""

from __future__ import annotations

from rljob_cli.local.node.volumes import RunPaths, folder_of


def test_memory_folder_is_short_enough_for_a_socket_when_the_pod_name_is_long(tmp_path):
    pod = {"metadata": {"name": "a" * 90}, "spec": {}}
    volume = {"name": "vllm", "emptyDir": {"medium": "Memory"}}
    assert len(str(folder_of(volume, pod, RunPaths(tmp_path, {})) / "socket")) <= 107
