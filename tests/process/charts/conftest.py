"""The pinned helm, and renderings of the chart."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from rljob_cluster.host.go_programs import find_or_build
from tests.paths import ROOT

CHART = ROOT / "charts" / "rljob"


@pytest.fixture(scope="session")
def helm():
    """Return a function that runs helm and shows its output on failure."""
    program = find_or_build("helm") / "helm"

    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([program, *arguments], capture_output=True, text=True)
        assert not check or done.returncode == 0, f"helm {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def render(helm):
    """Return a function that renders all objects of the chart for some arguments."""

    def run(*arguments: str, minor: str = "1.37") -> list[dict]:
        command = ["template", "rljob", str(CHART), "--namespace", "ops", "--kube-version", f"{minor}.0"]
        return [o for o in yaml.safe_load_all(helm(*command, *arguments).stdout) if o]

    return run
