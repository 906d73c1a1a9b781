"""A function's requirements, installed by the real installer into an environment apart from the server's."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_api.wire.contract import ExitCode
from rljob_service.pool.requirements import find_uv
from tests.support.pythons import require_python
from tests.support.reward_process import Server
from tests.support.waiting import DEADLINE_SECONDS

StartServer = Callable[..., Server]

SCORER = """
def compute_score(solution_str, factor=1.0):
    return factor * len(solution_str)

def count_packages(completions):
    from importlib.util import find_spec
    return [float(sum(find_spec(name) is not None for name in ("pydantic", "uvloop", "torch")))]
"""
SOURCE = "def compute_score(solution_str): return 1.0"


def build_wheel(folder: Path) -> str:
    """Return a requirement line for a small package."""
    info = "rljobtry-1.0.dist-info"
    wheel = folder / "rljobtry-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("rljobtry/__init__.py", "")
        archive.writestr("rljobtry/scorer.py", SCORER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: rljobtry\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"rljobtry @ {wheel.as_uri()}"


def test_module_from_requirements_is_served_and_its_environment_reused(
    start_server: StartServer, tmp_path: Path
) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    function = {"module": "rljobtry.scorer", "requirements": [build_wheel(tmp_path)]}
    first = start_server(None, environment=environment, slots=1, function=function | {"kwargs": {"factor": 2.0}})
    assert first.score("abc")["score"] == 6.0
    assert first.request("GET", "/v1/info")[1]["entrypoint"] == "compute_score"
    second = start_server(None, environment=environment, slots=1, function=function | {"entrypoint": "count_packages"})
    assert second.score("abc")["score"] == 0.0, "the server's packages are not in the environment"
    assert "installs the function's requirements" in first.log.read_text()
    assert "installs the function's requirements" not in second.log.read_text()


@pytest.mark.slow
def test_uninstallable_requirement_is_a_user_error(start_server: StartServer, tmp_path: Path) -> None:
    line = f"nowhere @ {(tmp_path / 'nowhere-1.0-py3-none-any.whl').as_uri()}"
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    server = start_server(SOURCE, environment=environment, wait=False, function={"requirements": [line]})
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.USER
    log = server.log.read_text()
    assert "function.requirements (nowhere @ " in log
    assert "correct the lines, or build an image" in log
    assert "Traceback" not in log


@pytest.mark.slow
def test_unreachable_index_is_an_infrastructure_error(start_server: StartServer, tmp_path: Path) -> None:
    index = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_FIND_LINKS": "", "UV_HTTP_RETRIES": "0"}
    environment = {"XDG_CACHE_HOME": str(tmp_path)} | index
    server = start_server(SOURCE, environment=environment, wait=False, function={"requirements": ["rljob-nowhere"]})
    assert server.process.wait(120) == ExitCode.INFRASTRUCTURE, server.log.read_text()
    assert " cannot be reached; set UV_INDEX_URL" in server.log.read_text()


def test_function_runs_with_the_python_that_the_reward_names(start_server: StartServer, tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), **require_python("3.12")}
    source = "import sys\ndef compute_score(solution_str): return float('%d.%d' % sys.version_info[:2])"
    server = start_server(source, environment=environment, slots=1, python="3.12")
    assert server.score("abc")["score"] == 3.12


def test_missing_python_is_a_user_error(start_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "uv").symlink_to(str(find_uv()))
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path), "UV_PYTHON_DOWNLOADS": "never"}
    other = "3.13" if sys.version_info[:2] != (3, 13) else "3.12"
    server = start_server(SOURCE, environment=environment, wait=False, python=other)
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.USER
    log = server.log.read_text()
    assert f"python: there is no Python {other} here: " in log
    assert f"`uv python install {other}`" in log
    assert "Traceback" not in log
