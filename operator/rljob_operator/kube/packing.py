"""Objects as the cache stores them: compressed JSON, with managedFields of the operator's own applies only. Pure.

Objects of one kind and role resemble each other, so the first of them is the dictionary for the others: a Pod whose
JSON has 8 KB takes 0.25 KB, a seventh of what zlib reaches without a dictionary. The first version of an object may
have no status, so a longer one of the same object replaces it. Objects are otherwise stored whole: leaving out the
fields that the plan does not read would save little more, and break a plan that begins to read one.
"""

import msgspec

from rljob_api.wire.contract import LABEL_ROLE
from rljob_core import compression
from rljob_core.backend import Manifest
from rljob_core.children.admitted import find_own_entry
from rljob_core.compression import MAX_DICTIONARY_BYTES, Packed
from rljob_core.json_depth import dump_json

MAX_DICTIONARIES = 256
"""Labels are users' text: without a bound they could fill the memory."""
_MIN_GROWTH = 1.03
"""Bounds the number of dictionaries that one object can be."""


class Packer:
    """Packs the objects of one cache."""

    def __init__(self) -> None:
        self._dictionaries: dict[tuple[str, str], tuple[str, bytes]] = {}
        """The uid of an object, and its JSON, by kind and role."""

    def pack(self, kind: str, manifest: Manifest) -> Packed:
        """Compress an object. `kind` is a Resource's key."""
        metadata = _without_others_fields(manifest["metadata"])
        raw = dump_json({**manifest, "metadata": metadata})
        role = str((metadata.get("labels") or {}).get(LABEL_ROLE, ""))
        return compression.pack(raw, self._choose_dictionary((kind, role), str(metadata.get("uid", "")), raw))

    def _choose_dictionary(self, group: tuple[str, str], uid: str, raw: bytes) -> bytes:
        raw, known = raw[-MAX_DICTIONARY_BYTES:], self._dictionaries.get(group)
        if known is None and len(self._dictionaries) == MAX_DICTIONARIES:
            return b""
        if known is None or (uid == known[0] and len(raw) > _MIN_GROWTH * len(known[1])):
            known = self._dictionaries[group] = uid, raw
        return known[1]


def _without_others_fields(metadata: Manifest) -> Manifest:
    """The metadata with what the operator needs of managedFields: which fields are still as it applied them."""
    own = find_own_entry(metadata.get("managedFields") or [])
    others = {name: value for name, value in metadata.items() if name != "managedFields"}
    return others | ({"managedFields": [own]} if own else {})


def unpack(packed: Packed) -> Manifest:
    manifest: Manifest = msgspec.json.decode(compression.unpack(packed))
    return manifest
