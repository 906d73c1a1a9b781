"""Which container tool is chosen, depending on what is installed and what works."""

import pytest

from rljob_cluster.host.commands import ClusterError
from rljob_cluster.images import tools
from rljob_cluster.images.tools import Buildah, Docker, Tool


class FakeMachine:
    """Programs on PATH; those that are broken fail `info`, and installation adds to them."""

    def __init__(self, installed: set[str], broken: set[str] = frozenset(), can_install: bool = True) -> None:
        self.installed, self.broken, self.can_install = set(installed), broken, can_install
        self.newly_installed: list[str] = []

    def which(self, program: str) -> str | None:
        return f"/usr/bin/{program}" if program in self.installed else None

    def try_run(self, tool: str, *arguments: str) -> bool:
        assert arguments == ("info",)
        return tool in self.installed - self.broken

    def install_missing(self, programs: list[str]) -> None:
        missing = [program for program in programs if program not in self.installed]
        if missing and not self.can_install:
            raise ClusterError(f"missing on this machine: {', '.join(missing)}")
        self.newly_installed += missing
        self.installed.update(missing)


def choose(
    monkeypatch: pytest.MonkeyPatch, machine: FakeMachine, *, is_hybrid: bool = False, requested: str = ""
) -> Tool:
    monkeypatch.setenv("CONTAINER_TOOL", requested)
    monkeypatch.delenv("BUILDAH_RUNTIME", raising=False)
    monkeypatch.setattr(tools.shutil, "which", machine.which)
    monkeypatch.setattr(tools, "try_run", machine.try_run)
    monkeypatch.setattr(tools, "install_missing", machine.install_missing)
    monkeypatch.setattr(tools, "is_hybrid", lambda: is_hybrid)
    return tools.choose_tool()


def test_buildah_is_installed_when_docker_has_no_daemon(monkeypatch, capsys):
    machine = FakeMachine({"docker"}, broken={"docker"})
    assert choose(monkeypatch, machine) == Buildah("runc")
    assert machine.newly_installed == ["buildah", "runc"]
    report = capsys.readouterr().err
    assert report == (
        "building images with buildah (runc): no tool worked before (buildah is not installed, `docker info` fails)\n"
    )


def test_buildah_is_installed_when_no_tool_exists(monkeypatch):
    machine = FakeMachine(set())
    assert choose(monkeypatch, machine) == Buildah("runc")
    assert machine.newly_installed == ["buildah", "runc"]


def test_docker_is_used_when_its_daemon_answers_and_buildah_is_missing(monkeypatch, capsys):
    machine = FakeMachine({"docker"})
    assert isinstance(choose(monkeypatch, machine), Docker)
    assert machine.newly_installed == []
    assert "building images with docker: its daemon answers" in capsys.readouterr().err


def test_docker_is_used_when_buildah_does_not_work(monkeypatch):
    assert isinstance(choose(monkeypatch, FakeMachine({"buildah", "docker"}, broken={"buildah"})), Docker)


def test_buildah_is_preferred_when_both_tools_work(monkeypatch):
    machine = FakeMachine({"buildah", "runc", "docker"})
    assert choose(monkeypatch, machine) == Buildah("runc")
    assert machine.newly_installed == []


def test_crun_is_left_to_buildah_unless_cgroups_are_hybrid(monkeypatch):
    assert choose(monkeypatch, FakeMachine({"buildah", "crun"})) == Buildah(None)
    machine = FakeMachine({"buildah", "crun"})
    assert choose(monkeypatch, machine, is_hybrid=True) == Buildah("runc")
    assert machine.newly_installed == ["runc"]


def test_buildah_runtime_of_the_user_is_kept(monkeypatch):
    monkeypatch.setattr(tools, "is_hybrid", lambda: True)
    monkeypatch.setenv("BUILDAH_RUNTIME", "youki")
    assert tools._choose_runtime() is None


def test_missing_packages_are_reported_when_they_cannot_be_installed(monkeypatch):
    with pytest.raises(ClusterError, match="missing on this machine: buildah"):
        choose(monkeypatch, FakeMachine({"docker"}, broken={"docker"}, can_install=False))


def test_broken_buildah_is_reported_when_docker_does_not_work(monkeypatch):
    with pytest.raises(ClusterError, match="`buildah info` fails"):
        choose(monkeypatch, FakeMachine({"buildah", "runc"}, broken={"buildah"}))


def test_requested_tool_is_used_or_rejected_with_a_remedy(monkeypatch):
    both = FakeMachine({"buildah", "runc", "docker"})
    assert isinstance(choose(monkeypatch, both, requested="docker"), Docker)
    assert isinstance(choose(monkeypatch, both, requested="buildah"), Buildah)
    with pytest.raises(ClusterError, match="`docker info` fails; start docker's daemon"):
        choose(monkeypatch, FakeMachine({"docker"}, broken={"docker"}), requested="docker")
    with pytest.raises(ClusterError, match="must be buildah or docker, got 'podman'"):
        choose(monkeypatch, both, requested="podman")
