"""Rows of JSON and CSV files, plain or compressed, exactly as written.

Leaves to `files` which files there are. Invariant: a value depends on its own text alone. No type is guessed from the
other values of its column: such a guess makes 12.0 of the answer 12, and null of the answer None.
"""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rljob_api.errors import UserError
from rljob_inputs.findings import first_line

Values = dict[str, Any]
LINES = ".jsonl"
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_MARK = b"\xef\xbb\xbf"
"""Editors on Windows begin a file of UTF-8 with it."""
_MAX_CELL_CHARACTERS = 2**31 - 1
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")
"""The parser has joined those of a pair."""
_FORMATS = {
    b"\x1f\x8b": "is compressed with gzip; name it {kind}.gz",
    b"PK\x03\x04": "is a ZIP archive; unpack it",
    b"PAR1": "is a Parquet file; name it .parquet",
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
}
"""First bytes of files that are often given a wrong name."""
_NO_DATA = {
    "<": "is a web page; download the file itself",
    "version https://git-lfs": "is a pointer of Git LFS; run `git lfs pull` in its repository",
}


def _open_zstandard(path: Path) -> IO[bytes]:
    import pyarrow  # heavy, and few files need it: Python has no zstandard before 3.14

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


_OPENERS: Mapping[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}
COMPRESSED = tuple(_OPENERS)
BROKEN = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading a damaged file raises."""


def open_data(path: Path) -> IO[bytes]:
    """Open a file for reading bytes, decompressed by its suffix. Reading raises BROKEN if it is damaged."""
    stream: IO[bytes] = _OPENERS[path.suffix](path) if path.suffix in _OPENERS else path.open("rb")
    return stream


def read_text_file(path: Path, kind: str) -> Iterator[tuple[Values, str]]:
    """Yield each row with its place. `kind`: .jsonl, .json, .csv or .tsv. Raise UserError with the line."""
    try:
        with open_data(path) as stream:
            read = _read_table if kind in _SEPARATORS else _read_json
            yield from read(
                path, (line if number else line.removeprefix(_MARK) for number, line in enumerate(stream)), kind
            )
    except BROKEN as error:
        if path.suffix in COMPRESSED:
            raise UserError(f"{path} is not readable as {kind}: {first_line(error)}") from error
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _read_json(path: Path, lines: Iterator[bytes], kind: str) -> Iterator[tuple[Values, str]]:
    """A .json file may be an array; all others are lines."""
    begin: list[bytes] = []
    for line in lines:
        begin.append(line)
        if line.strip():
            break
    if kind != LINES and begin and begin[-1].lstrip().startswith(b"["):
        return _read_array(path, b"".join(itertools.chain(begin, lines)))
    return _read_lines(path, itertools.chain(begin, lines), kind)


def _read_lines(path: Path, lines: Iterable[bytes], kind: str) -> Iterator[tuple[Values, str]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            place = f"{path}:{number}"
            text = _decode(path, number, line, kind)
            row = _check_row(_parse_line(path, number, text, kind), place, "each line", text)
            if kind != LINES and (isinstance(row.get("data"), list) or _has_columns(row)):
                raise UserError(f"{place}: is one object; save its data alone, as an array of rows")
            yield row, place


def _has_columns(row: Values) -> bool:
    """Whether it is a whole table, as pandas writes one with orient="list"; conversations are lists of objects."""
    cells = [type(cell) for column in row.values() if isinstance(column, list) for cell in column]
    return bool(cells) and all(isinstance(column, list) for column in row.values()) and {*cells} <= {str, int, float}


def _read_array(path: Path, content: bytes) -> Iterator[tuple[Values, str]]:
    try:
        text = content.decode()
        rows = _parse(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {content[error.start]:#04x}); save it in UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable as .json: {first_line(error)}") from error
    for number, row in enumerate(rows, 1):
        place = f"{path} row {number}"
        yield _check_row(row, place, "each entry", text), place


def _parse_line(path: Path, number: int, text: str, kind: str) -> Any:
    try:
        return _parse(text.strip())
    except (ValueError, RecursionError) as error:
        if kind == LINES and number == 1 and text.strip() == "[":
            raise UserError(f"{path}:1: is a JSON array; name it .json") from error
        known = next((what for start, what in _NO_DATA.items() if text.lstrip().lower().startswith(start)), "")
        problem = known or f"not JSON: {error}; each line must be one JSON object"
        raise UserError(f"{path}:{number}: {problem}") from error


def _parse(text: str) -> Any:
    """NaN and infinities, which Python writes and JSON does not have, are null: rewards receive JSON."""
    return json.loads(text, parse_constant=lambda _: None)


def _check_row(row: Any, place: str, what: str, text: str) -> Values:
    """`text`: from which the row was parsed. Half a surrogate pair is no character: neither a tokenizer nor a request
    takes it."""
    if not isinstance(row, dict):
        raise UserError(f"{place}: {what} must be a JSON object, got {type(row).__name__}")
    if _ESCAPED_HALF.search(text) and (half := _HALF.search(json.dumps(row, ensure_ascii=False))):
        raise UserError(f"{place}: has \\u{ord(half[0]):04x}, half of a character; write the whole one, or remove it")
    return row


def _read_table(path: Path, stream: Iterator[bytes], kind: str) -> Iterator[tuple[Values, str]]:
    """Each value is text, as it is written; that of an empty or missing cell is None."""
    csv.field_size_limit(_MAX_CELL_CHARACTERS)  # of the process; 131,072 by default
    lines = (_decode(path, number, line, kind) for number, line in enumerate(stream, 1))
    reader = csv.reader(lines, delimiter=_SEPARATORS[kind], strict=True)
    try:
        records = filter(None, reader)  # a blank line has no cells
        names = _read_names(path, next(records, []))
        for number, cells in enumerate(records, 1):
            if len(cells) > len(names):
                problem = f"has {len(cells)} values for the {len(names)} columns of the first line"
                raise UserError(f"{path}:{reader.line_num}: {problem}; put a value with {_name(kind)} in quotes")
            values = itertools.zip_longest(names, (cell or None for cell in cells))
            yield dict(values), f"{path} row {number}"
    except csv.Error as error:
        problem = f"is not readable as {kind}: {error}"
        raise UserError(f"{path}:{reader.line_num}: {problem}; write a quote within quotes as two") from error


def _read_names(path: Path, cells: list[str]) -> list[str]:
    """Return the names of the columns. One without a name, such as an index of pandas, gets pandas' name for it."""
    if len(cells) == 1 and ";" in cells[0]:
        raise UserError(f"{path}:1: is separated by semicolons; save it with commas between the columns")
    names = [cell or f"Unnamed: {index}" for index, cell in enumerate(cells)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path}:1: has {names.count(twice[0])} columns {twice[0]}; rename all but one")
    return names


def _name(kind: str) -> str:
    return "tabs" if _SEPARATORS[kind] == "\t" else "commas"


def _decode(path: Path, number: int, line: bytes, kind: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        formats = (text.format(kind=kind) for start, text in _FORMATS.items() if number == 1 and line.startswith(start))
        what = "JSON lines" if kind == LINES else kind
        problem = f"is not UTF-8 text (byte {line[error.start]:#04x}); save it as {what} in UTF-8"
        raise UserError(f"{path}:{number}: {next(formats, problem)}") from error
