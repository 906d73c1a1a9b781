"""Texts that resemble each other, compressed with one of them as the dictionary of the others."""

import zlib

MAX_DICTIONARY_BYTES = 32 * 1024
"""zlib refers back no further."""

Packed = tuple[bytes, bytes]
"""(data, dictionary). Many share a dictionary; it may be empty."""


def pack(text: bytes, dictionary: bytes) -> Packed:
    """`dictionary` has at most MAX_DICTIONARY_BYTES, and is kept as it is."""
    compressor = zlib.compressobj(zdict=dictionary) if dictionary else zlib.compressobj()
    return compressor.compress(text) + compressor.flush(), dictionary


def unpack(packed: Packed) -> bytes:
    data, dictionary = packed
    decompressor = zlib.decompressobj(zdict=dictionary) if dictionary else zlib.decompressobj()
    return decompressor.decompress(data)
