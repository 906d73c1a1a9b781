"""The helm of this repository's pin, and what the chart renders with it."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from rljob_cluster.host.go_programs import find_or_build
from tests.paths import ROOT

CHART = ROOT / "charts" / "rljob"


@pytest.fixture(scope="session")
def helm():
    """Run helm; a failure shows what it said."""
    program = find_or_build("helm") / "helm"

    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([program, *arguments], capture_output=True, text=True)
        assert not check or done.returncode == 0, f"helm {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def render(helm):
    """Every object that the chart makes of some arguments."""

    def run(*arguments: str, minor: str = "1.37") -> list[dict]:
        command = ["template", "rljob", str(CHART), "--namespace", "ops", "--kube-version", f"{minor}.0"]
        return [o for o in yaml.safe_load_all(helm(*command, *arguments).stdout) if o]

    return run
