"""The files of a model, in a folder, in a repository of the Hub or in object storage, without its weights.

Invariant: nothing is read until it is needed; sizes come from the folder, or from a listing.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_inputs.findings import InputError
from rljob_inputs.hub import HubAccess, at_source, find_repository, repository_name
from rljob_inputs.machine.bounded import reading
from rljob_inputs.objects.access import is_object
from rljob_inputs.objects.copies import Copy, Report, open_copy

log = logging.getLogger(__name__)

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class ModelFiles:
    place: str
    """The folder, hf://org/name or s3://bucket/path, for messages."""
    sizes: Mapping[str, int]
    """Bytes by name. 0: unknown."""
    fetch: Callable[[str], Path]
    """Returns the local path of a small file."""
    folder: Path | None
    """None: the weights are on the Hub or in object storage."""

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON object; empty if the file is missing. Raise UserError if it is something else."""
        if name not in self.sizes:
            return {}
        try:
            with reading(f"{self.place}/{name}"):
                value = json.loads(self.fetch(name).read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.place}/{name} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise UserError(f"{self.place}/{name} must be a JSON object, got {type(value).__name__}")
        return value


def open_model(location: str, revision: str | None, access: HubAccess | None = None) -> ModelFiles:
    """Return the files of a model at `location`: a folder, hf://org/name or s3://bucket/path.

    Raise UserError if there is no such model, and TransientError if its storage cannot be reached.
    """
    if location.startswith("hf://"):
        repository = find_repository(location, "model", revision, access or HubAccess())
        place = location + " (in the cache: the Hub does not answer)" * repository.is_cached
        return ModelFiles(place, repository.files, repository.download, None)
    if is_object(location):
        copy = _open_copy(location, access)
        sizes = {name: found.size for name, found in copy.listing.objects.items()}
        return ModelFiles(copy.listing.url, sizes, copy.fetch, None)
    folder = Path(location)
    if not folder.is_dir():
        missing = f"folder {folder} not found; a model of the Hub is hf://org/name"
        raise UserError(f"{folder} is a file; a model is a folder" if folder.exists() else missing)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    return ModelFiles(location, sizes, folder.joinpath, folder)


def _open_copy(url: str, access: HubAccess | None, report: Report = log.info) -> Copy:
    objects = (access or HubAccess.from_environment(os.environ)).objects
    return open_copy(url, objects, report)


def place_model(location: str, *, weights: bool = True, report: Report = log.info) -> str:
    """Return what transformers and vLLM load a model by: a folder, or org/name for the Hub. A model in object storage
    is downloaded to this machine's cache first, unless it is there; with `weights` false, without its weights.

    Raise as `open_model`."""
    if not is_object(location):
        return repository_name(location)
    copy = _open_copy(location, None, report)
    names = [name for name in copy.listing.objects if weights or not name.endswith(_WEIGHTS)]
    return str(copy.fetch_all(names))


def open_trained_model(location: str, revision: str | None, access: HubAccess | None = None) -> ModelFiles:
    """Return the files of spec.model. Raise InputError if they have no config.json, and as open_model."""
    with at_source("spec.model"):
        files = open_model(location, revision, access)
    if "config.json" not in files.sizes:
        raise InputError("spec.model.source", f"{location} has no config.json; {describe_missing_config(files)}")
    return files


def describe_missing_config(files: ModelFiles) -> str:
    if base := files.read_json("adapter_config.json").get("base_model_name_or_path"):
        return f"it is a LoRA adapter of {base}: set {base}, or merge them first, with peft's merge_and_unload"
    return "set a Hugging Face folder, as save_pretrained writes it, or hf://org/name"


def read_config(location: str, revision: str | None, access: HubAccess | None = None) -> dict[str, Any]:
    """Return config.json of the trained model. Raise InputError if it is missing, and as open_model."""
    with at_source("spec.model"):
        return open_trained_model(location, revision, access).read_json("config.json")
