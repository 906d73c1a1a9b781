"""The local folders of volumes."""

from __future__ import annotations

import pytest

from rljob_cli.local.node.podspec import ContainerConfigError
from rljob_cli.local.node.volumes import RunPaths, folder_of


def test_memory_folder_is_short_enough_for_a_socket_when_the_pod_name_is_long(tmp_path):
    pod = {"metadata": {"name": "a" * 90}, "spec": {}}
    volume = {"name": "vllm", "emptyDir": {"medium": "Memory"}}
    assert len(str(folder_of(volume, pod, RunPaths(tmp_path, {})) / "socket")) <= 107


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({"projected": {"sources": []}}, "projected"),
        ({"configMap": {"name": "c", "items": [{"key": "a", "path": "b"}]}}, "configMap.items"),
    ],
)
def test_volume_that_the_local_backend_does_not_support_is_refused(tmp_path, source, named):
    pod = {"metadata": {"name": "p"}, "spec": {"containers": []}}
    with pytest.raises(ContainerConfigError, match=f"volume v uses .*: {named}$"):
        folder_of({"name": "v", **source}, pod, RunPaths(tmp_path, {}))
