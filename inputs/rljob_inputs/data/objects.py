"""Rows of objects: files are chosen as in a folder, and each is downloaded when its rows are needed.

Invariant: places and errors name the objects, never their local copies.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from rljob_api.errors import UserError
from rljob_inputs.data.files import choose_files, has_saved, read_file
from rljob_inputs.data.text_files import Values
from rljob_inputs.errors import InputError
from rljob_inputs.objects.access import ObjectAccess
from rljob_inputs.objects.copies import Copy, open_copy
from rljob_inputs.objects.listing import Listing


def read_objects(url: str, split: str, field: str, access: ObjectAccess) -> Iterator[tuple[Values, str]]:
    """Yield each row at a URL of one object, a prefix or a glob, with its place. Raise InputError at `field`, and
    StorageAwayError if the storage does not answer."""
    copy: Copy | None = None
    try:
        copy = open_copy(url, access)
        for path in _fetch(copy):
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
