"""The weights of a model by their headers: complete, in a format that is loaded, and how many parameters.

Reads only headers, so a file of any size takes milliseconds. The ranks compare every name with the model's own.
"""

import json
import math
import re
import struct
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_inputs.models.files import ModelFiles

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FORMATS = ("*.safetensors", "*.bin")
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""
_LFS_POINTER = b"version https://git-lfs"
_BYTES_PER_PARAMETER = {"float32": 4, "float64": 8, "float8_e4m3fn": 1}
_DEFAULT_BYTES_PER_PARAMETER = 2
_COPY_AGAIN = "copy or download it again"
_OTHER_PARTS = re.compile(r"(^|\.)(visual|\w*vision\w*|\w*audio\w*|\w*projector\w*|connector|mtp)(\.|$)")
"""Names of modules for images and sounds, of what connects them, and of layers that predict further tokens."""
Header = dict[str, Any]


def find_weight_problems(files: ModelFiles) -> Iterator[str]:
    """Yield what is missing or broken."""
    if not any(_matching(files, pattern) for pattern in _FORMATS):
        gguf = " but GGUF files, which cannot be trained" if _matching(files, "*.gguf") else ""
        yield f"{files.place} has no weights (*.safetensors){gguf}"
        return
    try:
        shards = set((files.read_json(_INDEX).get("weight_map") or {}).values())
    except UserError as error:
        yield str(error)
        return
    if missing := sorted(shards - files.sizes.keys()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield f"{files.place} lacks {missing[0]}{more}, which {_INDEX} names; copy or download the model again"
    folder = files.folder
    for name in _matching(files, "*.safetensors") if folder is not None else ():
        assert folder is not None
        try:
            header = read_header(folder / name)
        except UserError as error:
            yield str(error)
        else:
            if any(tensor.endswith("lm_head.bias") for tensor in header):
                yield f"{files.place} adds a bias to its logits, which the trainer does not support"


def count_parameters(files: ModelFiles, dtype: str | None = None) -> int:
    """Return the number of parameters that are trained; 0 if it is unknown. `dtype` is that of config.json, for weights
    on the Hub, whose number includes what reads images."""
    names = _matching(files, "*.safetensors")
    if files.folder is not None and names:
        headers = _readable_headers(files)
        return sum(math.prod(entry["shape"]) for header in headers for entry in header.values())
    num_bytes = sum(files.sizes[name] for name in names or _matching(files, "*.bin"))
    return num_bytes // _BYTES_PER_PARAMETER.get(dtype or "", _DEFAULT_BYTES_PER_PARAMETER)


def find_matrices(files: ModelFiles) -> set[str]:
    """Return the last parts of the names of modules that have a matrix as weight, such as q_proj; empty if unknown."""
    names: set[str] = set()
    for header in _readable_headers(files):
        names |= {
            tensor.split(".")[-2]
            for tensor, entry in header.items()
            if tensor.endswith(".weight") and len(entry["shape"]) == 2
        }
    return names


def read_header(path: Path) -> Header:
    """Return a safetensors file's header. Raise UserError unless the file is complete."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                raise UserError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
            (length,) = struct.unpack("<Q", start[:8])
            if length > min(_MAX_HEADER_BYTES, size):
                raise UserError(f"{path} is not a complete safetensors file ({size} bytes); {_COPY_AGAIN}")
            stream.seek(8)
            header: Header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not a safetensors file: {error}; {_COPY_AGAIN}") from error
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise UserError(f"{path} is truncated: it has {size} of {expected} bytes; {_COPY_AGAIN}")
    return header


def _readable_headers(files: ModelFiles) -> Iterator[Header]:
    """Yield the tensors of each complete file, without those that no text model has."""
    if files.folder is None:
        return
    for name in _matching(files, "*.safetensors"):
        try:
            header = read_header(files.folder / name)
        except UserError:
            continue
        yield {
            tensor: entry
            for tensor, entry in header.items()
            if tensor != "__metadata__" and not _OTHER_PARTS.search(tensor)
        }


def _matching(files: ModelFiles, pattern: str) -> list[str]:
    return sorted(name for name in files.sizes if fnmatch(name, pattern))
