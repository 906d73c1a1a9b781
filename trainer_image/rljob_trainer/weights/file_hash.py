"""The hash of a weight file, for integrity alone: it detects errors of transfers, not tampering.

XXH3 of the hashes of the file's chunks. Several threads can hash chunks, in any order, while they are in a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

CHUNK_BYTES = 1 << 20
"""All chunks but the last have this size."""


def hash_chunk(data: memoryview) -> bytes:
    return xxhash.xxh3_128(data).digest()


def split(data: memoryview) -> Iterator[memoryview]:
    """Yield the chunks of a file's content."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def hash_file(chunks: Iterable[bytes]) -> str:
    """`chunks`: what `hash_chunk` returned, in the order of the file."""
    return xxhash.xxh3_128(b"".join(chunks)).hexdigest()
