"""The pinned helm, and renderings of the chart."""

from __future__ import annotations

import functools
import subprocess

import pytest

from rljob_cluster.host.go_programs import find_or_build
from tests.paths import ROOT
from tests.support import fast_yaml

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

    @functools.cache
    def template(*arguments: str) -> str:
        return helm("template", "rljob", str(CHART), "--namespace", "ops", *arguments).stdout

    def run(*arguments: str, minor: str = "1.37") -> list[dict]:
        return fast_yaml.load_all(template("--kube-version", f"{minor}.0", *arguments))

    return run
