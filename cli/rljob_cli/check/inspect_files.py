"""What is in the files that a job names: a model folder, rows of data. Reads; judges nothing but the files' form."""

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
"""Rows that are read to the end of a JSONL file; a larger one is looked at as far as this."""
_BYTES_OF_BIN_PARAMETER = 2


@dataclass
class DataFile:
    """What was found in one file of rows."""

    columns: list[str] = field(default_factory=list)
    problem: str = ""
    """What is wrong with the file; empty when nothing is."""


def find_data_files(path: Path) -> list[Path]:
    """The files behind a path: itself, or the folder's."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in DATA_SUFFIXES)


def inspect_data(path: Path) -> DataFile:
    """Columns of a JSONL or Parquet file, or what is wrong with it."""
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
                return DataFile(problem=f"{path}:{number}: is no JSON: {error}; each line must be one JSON object")
            if not isinstance(row, dict):
                return DataFile(problem=f"{path}:{number}: must be a JSON object, got {type(row).__name__}")
            # The columns of every row count: one that is missing later is as bad as one that never was.
            columns = dict.fromkeys(row) if num_rows == 0 else {name: None for name in columns if name in row}
            num_rows += 1
            if num_rows >= _MAX_ROWS:
                break
    return DataFile(list(columns)) if num_rows else DataFile(problem=f"{path} has no rows")


def _inspect_parquet(path: Path) -> DataFile:
    try:
        from pyarrow import parquet
    except ImportError:  # The trainer brings it; without it preflight has said so already.
        return DataFile(problem="")
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's errors have no common base
        return DataFile(problem=f"{path} is no Parquet file: {error}")
    if not file.metadata.num_rows:
        return DataFile(problem=f"{path} has no rows")
    return DataFile(list(file.schema_arrow.names))


def find_model_problem(folder: Path) -> str:
    """Why the folder is no Hugging Face model; empty when it looks like one."""
    if not folder.exists():
        return f"there is no folder {folder}"
    if not folder.is_dir():
        return f"{folder} is a file; a model is a folder"
    if not (folder / "config.json").is_file():
        return f"{folder} is no model folder: it has no config.json"
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        return f"{folder}/config.json is no JSON: {error}"
    if not isinstance(config, dict) or not config.get("model_type"):
        return f"{folder}/config.json names no model_type"
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        return f"{folder} has no weights (*.safetensors)"
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return f"{folder} has no tokenizer (tokenizer.json)"
    return ""


def count_parameters(folder: Path) -> int:
    """Number of parameters, from the headers of the weights; 0 where they cannot be read."""
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
        total = sum(file.stat().st_size for file in folder.glob("*.bin")) // _BYTES_OF_BIN_PARAMETER
    return total
