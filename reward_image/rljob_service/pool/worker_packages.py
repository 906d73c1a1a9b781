"""The packages that workers import besides the standard library: RLJob's own, and those of installed plugins."""

import importlib.util
from pathlib import Path

from rljob_api.functions.plugins import ENVIRONMENTS, SIGNATURES, find_plugins

_OWN = ("rljob_api", "rljob_service")


def find_worker_packages() -> dict[str, Path]:
    """Return the folder of each package by its name; of a module without a folder, its file. Nothing is imported."""
    references = [*find_plugins(SIGNATURES).values(), *find_plugins(ENVIRONMENTS).values()]
    found = {
        name: _locate(name) for name in sorted({*_OWN, *(each.split(":")[0].split(".")[0] for each in references)})
    }
    return {name: path for name, path in found.items() if path is not None}


def _locate(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None:  # a worker names the plugin that cannot be imported
        return None
    folder = next(iter(spec.submodule_search_locations or ()), spec.origin)
    return Path(folder) if folder else None
