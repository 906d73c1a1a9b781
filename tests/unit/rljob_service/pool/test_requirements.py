"""The environment of a function's requirements: errors, variables of the installers, completeness. Installs nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_service.pool import requirements

UV_UNREACHABLE = """error: Failed to fetch: `http://127.0.0.1:9/index/sympy/`
  Caused by: error sending request for url (http://127.0.0.1:9/index/sympy/)"""
UV_MISSING = """  x No solution found when resolving dependencies:
  `-> Because sympy was not found in the package registry, we can conclude that your requirements are unsatisfiable."""


@pytest.mark.parametrize(
    ("output", "error", "remedy"),
    [
        (UV_UNREACHABLE, TransientError, "the package index cannot be reached; set UV_INDEX_URL"),
        ("error: No space left on device (os error 28)", TransientError, "give the Pod more ephemeral storage"),
        (UV_MISSING, UserError, "correct the lines, or build an image"),
    ],
)
def test_error_depends_on_the_installers_output(output: str, error: type[Exception], remedy: str) -> None:
    explained = requirements._explain(output, ["sympy"])
    assert type(explained) is error
    assert "function.requirements (sympy) cannot be installed" in str(explained)
    assert remedy in str(explained)


UV_BUILD = """error: No solution found when resolving dependencies
  cause: Because sympy==1.0.0 has no usable wheels and you require sympy, we can conclude that your requirements are \
unsatisfiable."""


@pytest.mark.parametrize(
    ("output", "is_mistake"),
    [
        (UV_MISSING, True),
        ("  cause: Because there is no version of sympy==99.0 and you require sympy==99.0, we can conclude", True),
        ("  cause: you require sympy<1 and sympy>=2, which are incompatible", True),
        ("error: Couldn't parse requirement in `-` at position 0", True),
        (UV_UNREACHABLE, False),
        (UV_BUILD, False),
        ("error: Git operation failed\n  cause: failed to clone", False),
    ],
)
def test_mistake_in_requirements_is_found_before_they_are_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str, is_mistake: bool
) -> None:
    """Only what no index and no compiler could help is an error of the lines."""
    called: list[list[str]] = []

    def call(command: list[str], _: object, given: str) -> SimpleNamespace:
        called.append([*command, given])
        return SimpleNamespace(returncode=1, stdout=output)

    monkeypatch.setattr(requirements, "_call", call)
    monkeypatch.setattr(requirements, "find_uv", lambda: "uv")
    monkeypatch.setenv("RLJOB_INSTALLED_ONLY", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = "cannot be installed" if is_mistake else "are not installed on this machine yet"
    with pytest.raises(UserError, match=f"function.requirements .*{expected}"):
        requirements.ensure_environment(["sympy", "numpy"])
    assert called[0][:3] == ["uv", "pip", "compile"]
    assert called[0][-1] == "sympy\nnumpy"
    assert "--no-build" in called[0], "a build runs the package's code"


def test_uv_of_the_own_environment_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
        (folder / "uv").write_text("#!/bin/sh\n")
        (folder / "uv").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", str(other))
    monkeypatch.setitem(sys.modules, "uv", None)  # not importable
    assert requirements.find_uv() == str(own / "uv")
    (own / "uv").unlink()
    assert requirements.find_uv() == str(other / "uv")
    monkeypatch.setitem(sys.modules, "uv", SimpleNamespace(find_uv_bin=lambda: "/packages/uv"))
    assert requirements.find_uv() == "/packages/uv"
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", "")
    assert requirements.find_uv() is None


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for pip_name, uv_names in requirements._INSTALLER_VARIABLES:
        for name in (pip_name, *uv_names):
            monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_installer_never_gets_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLJOB_TOKEN", "secret")
    assert "RLJOB_TOKEN" not in requirements._build_environment()


def test_uv_gets_the_index_of_pip_and_keeps_its_own(clean_environment: pytest.MonkeyPatch) -> None:
    clean_environment.setenv("PIP_INDEX_URL", "http://index/simple")
    clean_environment.setenv("PIP_EXTRA_INDEX_URL", "http://extra")
    clean_environment.setenv("UV_INDEX", "http://x")
    environment = requirements._build_environment()
    assert (environment["UV_DEFAULT_INDEX"], environment["UV_INDEX"]) == ("http://index/simple", "http://x")


def test_incomplete_environment_is_created_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    created = []

    def create(folder: Path, python: Path, lines: list[str], version: str | None) -> None:
        assert not folder.exists()
        created.append(lines)
        python.parent.mkdir(parents=True)
        python.touch()

    monkeypatch.setattr(requirements, "_create", create)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    python = Path(requirements.ensure_environment(["sympy"]))
    assert requirements.ensure_environment(["sympy"]) == str(python)
    assert len(created) == 1
    (python.parents[1] / "rljob-complete").unlink()
    assert requirements.ensure_environment(["sympy"]) == str(python)
    assert len(created) == 2


def test_digest_depends_on_the_contents_of_constraint_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    digests = [requirements._digest(["sympy"])]
    monkeypatch.setenv("UV_CONSTRAINT", str(file))
    for text in ("sympy<1.14", "sympy<1.13"):
        file.write_text(text)
        digests.append(requirements._digest(["sympy"]))
    assert len(set(digests)) == 3


def test_another_python_has_its_own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    created = []

    def create(folder: Path, python: Path, lines: list[str], version: str | None) -> None:
        created.append(version)
        folder.mkdir()

    monkeypatch.setattr(requirements, "_create", create)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    other = "3.13" if own != "3.13" else "3.12"
    first = requirements.ensure_environment(["sympy"])
    assert requirements.ensure_environment(["sympy"], own) == first
    assert requirements.ensure_environment(["sympy"], other) != first
    assert created == [None, other]


def test_machine_without_uv_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(requirements, "find_uv", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="need uv, which is not here"):
        requirements.ensure_environment(["sympy"])


def test_missing_python_is_a_user_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = SimpleNamespace(returncode=1, stdout="error: No interpreter found for Python 3.0")
    monkeypatch.setattr(requirements, "find_uv", lambda: "uv")
    monkeypatch.setattr(requirements, "_call", lambda *_: found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no Python 3\.0 here: error: No interpreter.*\n.*pythonImages"):
        requirements.ensure_environment([], "3.0")
