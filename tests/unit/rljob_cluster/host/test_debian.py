import os

import pytest

from rljob_cluster.host import debian
from rljob_cluster.host.commands import ClusterError
from rljob_cluster.host.debian import install_missing


def test_existing_programs_need_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(debian.shutil, "which", lambda program: f"/usr/bin/{program}")
    install_missing(["buildah"])


def test_missing_packages_are_named_to_users_who_cannot_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(debian.shutil, "which", lambda program: "/usr/bin/runc" if program == "runc" else None)
    with pytest.raises(ClusterError, match="missing on this machine: containerd, iproute2;"):
        install_missing(["runc", "containerd", "ctr", "ip"])
