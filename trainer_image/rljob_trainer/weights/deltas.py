"""What changed in a chunk of a weight file since the version before. Pure.

An update with a small learning rate changes few bf16 values, most of them in their last bits: at 1e-6 one in 25.
A delta has the gaps between the places of changed halfwords and the exclusive or of old and new, both by byte planes,
which zlib packs well. It is applied in place, so that a receiver needs no second file.
"""

import zlib

import numpy as np
import numpy.typing as npt

from rljob_trainer.weights.checksum import CHUNK_BYTES

_MAX_CHANGED = 1 / 8
"""Share of halfwords. With more, a network is faster than the search for them."""
_ENTRY_BYTES = 6
"""A changed halfword has 4 bytes of the gap and 2 of the difference."""


def encode(old: memoryview, new: memoryview) -> bytes:
    """Return the delta of two chunks of equal size; empty if it is not worth it."""
    if len(new) % 2:
        return b""
    before, after = np.frombuffer(old, "<u2"), np.frombuffer(new, "<u2")
    places = np.flatnonzero(before != after)
    if len(places) > _MAX_CHANGED * len(after):
        return b""
    gaps = np.diff(places, prepend=0).astype("<u4")
    # Runs and Huffman codes alone: shorter here than a search for repetitions, and twice as fast.
    packer = zlib.compressobj(1, strategy=zlib.Z_RLE)
    return packer.compress(_planes(gaps) + _planes(before[places] ^ after[places])) + packer.flush()


def apply(delta: bytes, target: memoryview) -> None:
    """Turn the old chunk into the new one. ValueError if the delta is damaged: then nothing has changed."""
    try:
        unpacked = zlib.decompressobj()
        planes = np.frombuffer(unpacked.decompress(delta, CHUNK_BYTES), np.uint8)
        if not unpacked.eof or unpacked.unused_data or len(planes) % _ENTRY_BYTES:
            raise ValueError("a delta is not complete")
        number = len(planes) // _ENTRY_BYTES
        places = np.cumsum(_values(planes[: 4 * number], "<u4"), dtype=np.int64)
        halfwords = np.frombuffer(target[: len(target) // 2 * 2], "<u2")
        halfwords[places] ^= _values(planes[4 * number :], "<u2")
    except (zlib.error, IndexError) as error:
        raise ValueError(f"a delta is damaged: {error}") from error


def _planes(values: npt.NDArray[np.integer]) -> bytes:
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _values(planes: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.integer]:
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(planes.reshape(size, -1).T).view(dtype).reshape(-1)
