"""What the files of a job contain: a model folder, rows of data. Checks only the form of the files."""

import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError

DATA_SUFFIXES = (".jsonl", ".parquet")
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_MAX_LINES = 50_000
"""Later lines of a JSONL file are not checked."""
_BYTES_PER_BIN_PARAMETER = 2


def find_data_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in DATA_SUFFIXES)


def read_columns(path: Path) -> list[str]:
    """Return the columns that all rows of a JSONL or Parquet file have. Raise UserError if it is neither."""
    if path.suffix not in DATA_SUFFIXES:
        raise UserError(f"{path} is neither .jsonl nor .parquet")
    columns = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    if columns is None:
        raise UserError(f"{path} has no rows")
    return columns


def _read_jsonl(path: Path) -> list[str] | None:
    columns: list[str] | None = None
    with path.open("rb") as file:
        for number, line in enumerate(itertools.islice(file, _MAX_LINES), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}:{number}: is not JSON: {error}; each line must be one JSON object") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: must be a JSON object, got {type(row).__name__}")
            columns = list(row) if columns is None else [name for name in columns if name in row]
    return columns


def _read_parquet(path: Path) -> list[str] | None:
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's errors have no common base
        raise UserError(f"{path} is not a Parquet file: {error}") from None
    return list(file.schema_arrow.names) if file.metadata.num_rows else None


def find_model_problem(folder: Path) -> str:
    """Return why the folder is not a Hugging Face model; empty if it looks like one."""
    if not folder.is_dir():
        return f"{folder} is a file; a model is a folder" if folder.exists() else f"folder {folder} not found"
    if not (folder / "config.json").is_file():
        return f"{folder} is not a Hugging Face model folder: config.json is missing"
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        return f"{folder}/config.json is not JSON: {error}"
    if not config.get("model_type"):
        return f"{folder}/config.json has no model_type"
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        return f"{folder} has no weights (*.safetensors)"
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return f"{folder} has no tokenizer (tokenizer.json)"
    return ""


def count_parameters(folder: Path) -> int:
    """Return the number of parameters from the headers of the weights; 0 if they cannot be read."""
    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header: dict[str, Any] = json.loads(stream.read(length))
        except (OSError, ValueError, struct.error):
            continue
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    if not total:
        total = sum(file.stat().st_size for file in folder.glob("*.bin")) // _BYTES_PER_BIN_PARAMETER
    return total
