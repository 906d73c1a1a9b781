"""The hash of a weight file, for integrity alone: it detects errors of transfers, not tampering.

XXH3 of the hashes of the file's chunks. Several threads can hash chunks, in any order, while they are in a cache; and a
receiver that has the hashes can verify a part of the file.
"""

import xxhash

CHUNK_BYTES = 1 << 20
"""All chunks but the last have this size."""
HASH_BYTES = 16
"""Size of a chunk's hash."""


def hash_chunk(data: memoryview) -> bytes:
    return xxhash.xxh3_128(data).digest()


def hash_file(hashes: bytes) -> str:
    """`hashes`: of all chunks, in the order of the file."""
    return xxhash.xxh3_128(hashes).hexdigest()
