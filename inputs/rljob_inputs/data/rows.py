"""Rows of a dataset, in order and each with its place: files, which `files` reads, objects and hf://.

Of objects, files are chosen as in a folder, and each is downloaded when its rows are needed. Invariants: rows are read
lazily, so a check may stop after some; every error names the file and the line or row; places and errors name the
objects, never their local copies.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from rljob_api import foreign_texts
from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job_sections import DataSource
from rljob_inputs.data.files import choose_files, find_files, has_saved, read_file
from rljob_inputs.data.text_files import Values
from rljob_inputs.findings import InputError, first_line
from rljob_inputs.hub import HubAccess, Repository, at_source, find_repository, offline_mode
from rljob_inputs.machine.bounded import reading
from rljob_inputs.objects.access import ObjectAccess, is_object
from rljob_inputs.objects.copies import Copy, open_copy
from rljob_inputs.objects.listing import Listing

_LOADING = threading.Lock()
"""Held while `datasets` opens data: its progress bars fail where two threads do so, as checks of two sources may."""


class Row(NamedTuple):
    values: Values
    position: int
    """Position among the rows that are used, from 0."""
    place: str
    """FILE:LINE of JSON lines, else FILE row NUMBER, both from 1."""


def split_field(split: str) -> str:
    """Return the field of spec.data that a split belongs to, unless the data is that of an evaluation set."""
    return "spec.data.train" if split == "train" else "spec.data.eval"


def read_rows(
    source: DataSource,
    location: str,
    *,
    split: str,
    access: HubAccess | None = None,
    is_check: bool = False,
    field: str = "",
) -> Iterator[Row]:
    """Yield the rows of `source`, found at `location`: a path, hf://org/name or s3://bucket/path.

    `field`: of the source in the manifest; empty: by `split`. A check streams a dataset of the Hub. Otherwise it is
    downloaded and cached; so are objects, file by file. Raise InputError if it is unreadable, and TransientError if its
    storage cannot be reached.
    """
    field = field or split_field(split)
    if location.startswith("hf://"):
        rows = _read_hub(source, location, source.split or split, field, access or HubAccess(), is_check=is_check)
    elif is_object(location):
        objects = (access or HubAccess.from_environment(os.environ)).objects
        rows = read_objects(location, source.split or split, field, objects)
    else:
        rows = _read_local(Path(location), source.split or split, field)
    end = None if source.limit is None else source.offset + source.limit
    limited = itertools.islice(rows, source.offset, end)
    return (Row(values, position, place) for position, (values, place) in enumerate(limited))


def _read_local(path: Path, split: str, field: str) -> Iterator[tuple[Values, str]]:
    with at_source(field):
        for file in find_files(path):
            with reading(str(file)):
                yield from read_file(file, split)


def _read_hub(
    source: DataSource, location: str, split: str, field: str, access: HubAccess, *, is_check: bool
) -> Iterator[tuple[Values, str]]:
    with at_source(field):
        repository = find_repository(location, "dataset", source.revision, access)
    try:
        table = _load_table(source, repository, split, is_check=is_check)
        if source.limit is not None and not is_check:
            table = table.select(range(min(source.offset + source.limit, len(table))))
        with reading(location):
            yield from ((dict(row), f"{location} row {number}") for number, row in enumerate(table, 1))
    except Exception as error:  # `datasets` and its clients raise dozens of types
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise TransientError(f"{location}: cannot read it from the Hub: {type(error).__name__}: {error}") from error
        raise _explain(error, source, location, split, field) from error


def _load_table(source: DataSource, repository: Repository, split: str, *, is_check: bool) -> Any:
    import datasets  # a second to import

    # Read at import only, and a job may name another Hub.
    datasets.config.HF_ENDPOINT = repository.access.url
    is_streamed = is_check and not repository.is_cached
    if is_streamed:
        datasets.config.TORCH_AVAILABLE = False  # else streaming imports torch
    with _LOADING, offline_mode() if repository.is_cached else contextlib.nullcontext():
        return datasets.load_dataset(
            repository.name,
            name=source.subset,
            split=split,
            revision=source.revision,  # not the commit: without a network, the cache is found by the branch's name
            token=repository.access.token,
            streaming=is_streamed,
        )


def _explain(error: Exception, source: DataSource, location: str, split: str, field: str) -> InputError:
    reason = first_line(error) or type(error).__name__
    if foreign_texts.NO_SUBSET.search(reason):
        given = f"has no subset {source.subset}" if source.subset else "has several subsets"
        return InputError(f"{field}.subset", f"{location} {given}: {_shorten(str(error))}")
    if foreign_texts.NO_SPLIT.search(reason):
        remedy = "" if source.split else f"; {field}.split is not set, which means {split}"
        return InputError(f"{field}.split", f"{location} has no split {split}: {reason}{remedy}")
    where = f"subset {source.subset}, split {split}"
    return InputError(f"{field}.source", f"{location} ({where}): cannot load the dataset: {reason}")


def _shorten(text: str, max_characters: int = 400) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= max_characters else f"{flat[:max_characters]}..."


def read_objects(url: str, split: str, field: str, access: ObjectAccess) -> Iterator[tuple[Values, str]]:
    """Yield each row at a URL of one object, a prefix or a glob, with its place. Raise InputError at `field`, and
    StorageAwayError if the storage does not answer."""
    copy: Copy | None = None
    try:
        copy = open_copy(url, access)
        for path in _fetch(copy):
            with reading(_name(str(path), copy)):
                for values, place in read_file(path, split):
                    yield values, _name(place, copy)
    except UserError as error:
        message = str(error) if copy is None else _name(str(error), copy)
        raise InputError(f"{field}.source", message) from error


def _fetch(copy: Copy) -> Iterator[Path]:
    """Yield the local path of each file; of save_to_disk, the folder."""
    listing = copy.listing
    if has_saved(listing.objects):
        yield copy.fetch_all()
        return
    yield from (copy.fetch(name) for name in _choose(listing))


def _choose(listing: Listing) -> list[str]:
    names = sorted(listing.objects)
    if listing.url.rstrip("/") != listing.base:
        return names  # those that the user named
    files = [PurePosixPath(name) for name in names if "/" not in name]
    return [str(each) for each in choose_files(listing.base, files, len(files) < len(names))]


def _name(text: str, copy: Copy) -> str:
    """Return a text with the URL in place of the copy's folder."""
    return text.replace(str(copy.folder), copy.listing.base)
