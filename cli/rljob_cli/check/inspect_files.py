"""What the files of a job contain: a model folder, rows of data. Checks only the form of the files."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATA_SUFFIXES = (".jsonl", ".parquet")
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_MAX_ROWS = 50_000
"""Later rows of a JSONL file are not checked."""
_BYTES_PER_BIN_PARAMETER = 2


@dataclass
class DataFile:
    """One file of rows."""

    columns: list[str] = field(default_factory=list)
    problem: str = ""
    """Empty: the file is valid."""


def find_data_files(path: Path) -> list[Path]:
    """Return the file itself, or the data files of a folder."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in DATA_SUFFIXES)


def inspect_data(path: Path) -> DataFile:
    """Return the columns of a JSONL or Parquet file, or its problem."""
    if path.suffix == ".parquet":
        return _inspect_parquet(path)
    if path.suffix != ".jsonl":
        return DataFile(problem=f"{path} is neither .jsonl nor .parquet")
    return _inspect_jsonl(path)


def _inspect_jsonl(path: Path) -> DataFile:
    columns: dict[str, None] = {}
    num_rows = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                return DataFile(problem=f"{path}:{number}: is not JSON: {error}; each line must be one JSON object")
            if not isinstance(row, dict):
                return DataFile(problem=f"{path}:{number}: must be a JSON object, got {type(row).__name__}")
            # Every row must have the column.
            columns = dict.fromkeys(row) if num_rows == 0 else {name: None for name in columns if name in row}
            num_rows += 1
            if num_rows >= _MAX_ROWS:
                break
    return DataFile(list(columns)) if num_rows else DataFile(problem=f"{path} has no rows")


def _inspect_parquet(path: Path) -> DataFile:
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's errors have no common base
        return DataFile(problem=f"{path} is not a Parquet file: {error}")
    if not file.metadata.num_rows:
        return DataFile(problem=f"{path} has no rows")
    return DataFile(list(file.schema_arrow.names))


def find_model_problem(folder: Path) -> str:
    """Return why the folder is not a Hugging Face model; empty if it looks like one."""
    if not folder.exists():
        return f"folder {folder} not found"
    if not folder.is_dir():
        return f"{folder} is a file; a model is a folder"
    if not (folder / "config.json").is_file():
        return f"{folder} is not a Hugging Face model folder: config.json is missing"
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        return f"{folder}/config.json is not JSON: {error}"
    if not isinstance(config, dict) or not config.get("model_type"):
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
