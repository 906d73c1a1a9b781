"""A function's own packages: installed once, apart from the server's, with errors that say what to do."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_api.errors import TransientError
from rljob_api.wire.contract import ExitCode
from rljob_reward.worker_pool import requirements
from tests.support.reward_process import Server

StartServer = Callable[..., Server]

SCORER = """
def compute_score(solution_str, factor=1.0):
    return factor * len(solution_str)

def count_packages(completions):
    from importlib.util import find_spec
    return [float(sum(find_spec(name) is not None for name in ("pydantic", "uvicorn", "torch")))]
"""


def build_wheel(folder: Path) -> str:
    """A requirement line for a small package, as from an index."""
    info = "rljobtry-1.0.dist-info"
    wheel = folder / "rljobtry-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("rljobtry/__init__.py", "")
        archive.writestr("rljobtry/scorer.py", SCORER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: rljobtry\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"rljobtry @ {wheel.as_uri()}"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a server with a cache of its own."""
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_a_function_may_be_a_module_of_a_package_that_its_requirements_install(
    start_server: StartServer, cache: dict[str, str], line: str
) -> None:
    function = {"module": "rljobtry.scorer", "requirements": [line], "kwargs": {"factor": 2.0}}
    server = start_server(None, environment=cache, slots=1, function=function)
    assert server.score("abc")["score"] == 6.0
    assert server.request("GET", "/v1/info")[1]["entrypoint"] == "compute_score"


def test_what_is_installed_once_is_used_again_and_the_servers_packages_are_not_in_it(
    start_server: StartServer, cache: dict[str, str], line: str
) -> None:
    function = {"module": "rljobtry.scorer", "requirements": [line], "entrypoint": "count_packages"}
    servers = [start_server(None, environment=cache, slots=1, function=function) for _ in range(2)]
    assert [server.score("abc")["score"] for server in servers] == [0.0, 0.0]
    assert "installing" not in servers[1].log.read_text()


def test_requirements_that_cannot_be_installed_end_the_server_with_their_error(
    start_server: StartServer, cache: dict[str, str], tmp_path: Path
) -> None:
    line = f"nowhere @ {(tmp_path / 'nowhere-1.0-py3-none-any.whl').as_uri()}"
    source = "def compute_score(solution_str): return 1.0"
    server = start_server(source, environment=cache, wait=False, function={"requirements": [line]})
    assert server.process.wait(60) == ExitCode.USER
    log = server.log.read_text()
    assert "function.requirements (nowhere @ " in log
    assert "Correct the lines, or build an image" in log
    assert "Traceback" not in log


def test_an_index_that_cannot_be_reached_is_no_fault_of_the_users(
    start_server: StartServer, cache: dict[str, str]
) -> None:
    source = "def compute_score(solution_str): return 1.0"
    environment = cache | {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_FIND_LINKS": "", "UV_HTTP_RETRIES": "0"}
    server = start_server(source, environment=environment, wait=False, function={"requirements": ["rljob-nowhere"]})
    assert server.process.wait(120) == ExitCode.INFRASTRUCTURE, server.log.read_text()
    assert "The package index was not reached" in server.log.read_text()


def test_a_full_disk_is_no_fault_of_the_users() -> None:
    error = requirements._explain("error: Failed to extract archive: No space left on device (os error 28)", ["torch"])
    assert isinstance(error, TransientError)
    assert "Give the Pod more ephemeral storage" in str(error)


def test_the_installer_gets_pips_index_and_never_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RLJOB_TOKEN": "secret",
        "PIP_INDEX_URL": "http://index/simple",
        "UV_INDEX": "http://x",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://extra")
    environment = requirements._environment()
    assert "RLJOB_TOKEN" not in environment
    assert (environment["UV_DEFAULT_INDEX"], environment["UV_INDEX"]) == ("http://index/simple", "http://x")


def test_a_half_made_environment_is_made_anew(tmp_path: Path, line: str) -> None:
    python = Path(requirements.ensure_environment([line], tmp_path))
    (python.parents[1] / "rljob-complete").unlink()
    python.unlink()
    assert requirements.ensure_environment([line], tmp_path) == str(python)
    assert python.exists()


def test_a_module_that_is_not_there_is_an_error_with_a_remedy(start_server: StartServer) -> None:
    server = start_server(None, wait=False, function={"module": "no_such_package.rewards"})
    assert server.process.wait(60) == ExitCode.USER
    assert "No module named 'no_such_package'. Name its package in function.requirements" in server.log.read_text()


def test_another_constraint_is_another_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    digests = [requirements._digest(["sympy"])]
    monkeypatch.setenv("UV_CONSTRAINT", str(file))
    for text in ("sympy<1.14", "sympy<1.13"):
        file.write_text(text)
        digests.append(requirements._digest(["sympy"]))
    assert len(set(digests)) == 3
