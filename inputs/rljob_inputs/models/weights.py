"""The weights of a model by their headers: complete, in a format that is loaded, and how many parameters.

Reads only headers, so a file of any size takes milliseconds.

`find_missing` finds what the names of tensors alone show: layers or parts of a layer that are not there, a head that is
not tied, names that a wrapper has changed. Layers differ in ways that only their code knows, so this judges tested
architectures alone; the ranks compare every name with the model's own. Invariant: no complete checkpoint is refused.
"""

import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_inputs.models.architectures import find_architecture, text_config
from rljob_inputs.models.files import ModelFiles

_LAYER = re.compile(r"(.+?)\.(\d+)\.(.+)")

_WRAPPED = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^(module|base_model)\.")
"""Names that torch.compile, FSDP, DDP and peft give."""

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.")

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

_MAX_NAMED = 3


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


def find_weight_problems(files: ModelFiles, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is missing or broken. `config`: config.json."""
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
    is_whole, folder = not missing, files.folder
    for name in _matching(files, "*.safetensors") if folder is not None else ():
        assert folder is not None
        try:
            header = read_header(folder / name)
        except UserError as error:
            is_whole = False
            yield str(error)
        else:
            if any(tensor.endswith("lm_head.bias") for tensor in header):
                yield f"{files.place} adds a bias to its logits, which the trainer does not support"
    if is_whole:
        names = {name for name in _tensor_names(files) if not _OTHER_PARTS.search(name)}
        yield from (f"{files.place} {problem}" for problem in find_missing(names, config))


def _tensor_names(files: ModelFiles) -> Iterable[str]:
    """Return the names of all tensors; nothing if they are unknown without a download of the weights."""
    if files.folder is not None:
        return [tensor for header in _readable_headers(files) for tensor in header]
    if _INDEX in files.sizes:
        return files.read_json(_INDEX).get("weight_map") or {}
    return files.list_tensors(_WEIGHTS) if _WEIGHTS in files.sizes else ()


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


def find_missing(names: Collection[str], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong. `names`: of the text model's tensors."""
    if wrapped := sorted(filter(_WRAPPED.search, names)):
        yield f"has the weight {wrapped[0]}, whose name a wrapper has changed: save the module inside of it"
        return
    # The names within each layer, by what is in front of its number.
    layers: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for match in filter(None, map(_LAYER.fullmatch, names)):
        layers[match[1]][int(match[2])].add(match[3])
    architecture = find_architecture(config)
    if architecture is None or not architecture.is_tested or not layers:
        return
    # A multimodal model says in two places whether its head is tied.
    is_tied = architecture.is_multimodal or config.get("tie_word_embeddings", architecture.ties_head)
    head = [] if is_tied or any(map(_HEAD.search, names)) else ["lm_head.weight"]
    if missing := sorted({*_find_in_layers(layers, text_config(config)), *head}):
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        yield f"lacks the weights {', '.join(missing[:_MAX_NAMED])}{more}; copy or download the model again"


def _find_in_layers(layers: Mapping[str, Mapping[int, set[str]]], text: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a layer lacks that another one of its kind has besides all that this one has."""
    count = next((text[name] for name in _COUNTS if isinstance(text.get(name), int)), 0)
    stem = max(layers, key=lambda each: sum(map(len, layers[each].values())))
    # Layers that reuse keys and values of others have none.
    kinds = text.get("layer_types") or [None] * count
    num_own = count - (text.get("num_kv_shared_layers") or 0)
    for number in range(count):
        own = layers[stem].get(number, set())
        if not own:
            yield f"{stem}.{number}.*"
            continue
        for other in range(min(count, len(kinds))):
            parts = layers[stem].get(other, set())
            is_alike = kinds[other] == kinds[number] and (other < num_own) == (number < num_own)
            if is_alike and own < parts:
                yield from (f"{stem}.{number}.{part}" for part in parts - own)
