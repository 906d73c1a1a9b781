"""The hashes of a weight file in memory. The product hashes chunks as it writes or receives them."""

from rljob_trainer.weights.checksum import CHUNK_BYTES, hash_chunk


def hash_chunks(data: memoryview) -> bytes:
    """Return the hashes of all chunks, in order."""
    return b"".join(hash_chunk(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))
