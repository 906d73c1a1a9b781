"""A tar archive as a stream of known size, so that its reader needs no end of the stream.

Links are followed: the cache of Hugging Face has links only. Invariant: the chunks have `count_bytes` bytes.
"""

import tarfile
from collections.abc import Iterator

from rljob_api.errors import UserError
from rljob_cli.submit.sources import File, Tree

_BLOCK_BYTES = tarfile.BLOCKSIZE
_CHUNK_BYTES = 256 * 1024
_END = bytes(2 * _BLOCK_BYTES)
_MODE = 0o644
"""Pods read the files as another user."""


def count_bytes(tree: Tree) -> int:
    return sum(len(_build_header(tree, file)) + _pad(file.num_bytes) for file in tree.files) + len(_END)


def stream(tree: Tree) -> Iterator[bytes]:
    """Yield the archive, whose names start with the tree's name. Raise UserError if a file changes meanwhile."""
    for file in tree.files:
        yield _build_header(tree, file)
        num_read = 0
        with file.path.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                num_read += len(chunk)
                if num_read <= file.num_bytes:
                    yield chunk
        if num_read != file.num_bytes:
            raise UserError(f"{file.path}: has changed while it was copied; run the command again")
        yield bytes(_pad(num_read) - num_read)
    yield _END


def _build_header(tree: Tree, file: File) -> bytes:
    info = tarfile.TarInfo(f"{tree.name}/{file.name}" if tree.is_folder else file.name)
    info.size, info.mode = file.num_bytes, _MODE
    info.mtime = file.modified_ns // 10**9
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _pad(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
