"""A folder becomes objects. Invariant: the file by which readers recognize a complete folder is written last."""

import logging
from collections.abc import Sequence
from pathlib import Path

from rljob_api.errors import UserError
from rljob_inputs.objects.access import ObjectAccess
from rljob_inputs.objects.copies import Report
from rljob_inputs.objects.folder import ObjectFolder
from rljob_inputs.objects.listing import has_objects
from rljob_inputs.objects.progress import Progress, describe_bytes

log = logging.getLogger(__name__)


def require_empty(url: str, access: ObjectAccess) -> None:
    """Raise UserError if there are objects below a URL, and as `list_objects` if they cannot be listed."""
    if has_objects(url, access):
        raise UserError(f"{url}: exists; choose a new prefix")


def upload_folder(
    folder: Path,
    url: str,
    access: ObjectAccess,
    *,
    last: Sequence[str] = (),
    report: Report = log.info,
    wrote: Report = lambda name: None,
) -> None:
    """Write all files of a folder below a URL; those that are named in `last` after all others, in this order. `wrote`
    is called with the name of each when it is there.

    Raise RefusedObjectError if the credentials may not write, and StorageAwayError if the storage does not answer."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    order = [*(name for name in files if name not in last), *(name for name in last if name in files)]
    total = sum(path.stat().st_size for path in files.values())
    what = f"uploads {url}"
    report(f"{what}: {len(files)} files, {describe_bytes(total)}")
    progress = Progress(what, total, report)
    objects = ObjectFolder(url.rstrip("/"), access)
    for name in order:
        objects.upload(files[name], name, progress.add)
        wrote(name)
