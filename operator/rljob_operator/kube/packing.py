"""Objects as the cache stores them: compressed JSON, with managedFields of the operator's own applies only. Pure.

Objects of one kind and role resemble each other, so the first of them is the dictionary for the others: a Pod whose
JSON has 8 KB takes 0.25 KB, a seventh of what zlib reaches without a dictionary. Objects are otherwise stored whole:
leaving out the fields that the plan does not read would save little more, and break a plan that begins to read one.
"""

import zlib

import orjson

from rljob_api.wire.contract import LABEL_ROLE
from rljob_core.backend import Manifest
from rljob_core.children.admitted import find_own_entry
from rljob_core.json_depth import dump_json

MAX_DICTIONARIES = 256
"""Labels are users' text: without a bound they could fill the memory."""
_DICTIONARY_BYTES = 32 * 1024
"""zlib refers back no further."""
_LEVEL = 1


Packed = tuple[bytes, bytes]
"""(data, dictionary). Objects share their dictionary; it may be empty. Not a class: garbage collections skip tuples of
bytes, and would stop the loop for as long as it takes to scan all objects."""


class Packer:
    """Packs the objects of one cache."""

    def __init__(self) -> None:
        self._dictionaries: dict[tuple[str, str], bytes] = {}

    def pack(self, kind: str, manifest: Manifest) -> Packed:
        """Compress an object. `kind` is a Resource's key."""
        metadata = _without_others_fields(manifest["metadata"])
        raw = dump_json({**manifest, "metadata": metadata})
        role = str((metadata.get("labels") or {}).get(LABEL_ROLE, ""))
        dictionary = self._dictionaries.get((kind, role), b"")
        if not dictionary and len(self._dictionaries) < MAX_DICTIONARIES:
            dictionary = self._dictionaries[kind, role] = raw[-_DICTIONARY_BYTES:]
        compressor = zlib.compressobj(_LEVEL, zdict=dictionary) if dictionary else zlib.compressobj(_LEVEL)
        return compressor.compress(raw) + compressor.flush(), dictionary


def _without_others_fields(metadata: Manifest) -> Manifest:
    """The metadata with what the operator needs of managedFields: which fields are still as it applied them."""
    own = find_own_entry(metadata.get("managedFields") or [])
    others = {name: value for name, value in metadata.items() if name != "managedFields"}
    return others | ({"managedFields": [own]} if own else {})


def unpack(packed: Packed) -> Manifest:
    data, dictionary = packed
    decompressor = zlib.decompressobj(zdict=dictionary) if dictionary else zlib.decompressobj()
    manifest: Manifest = orjson.loads(decompressor.decompress(data))
    return manifest
