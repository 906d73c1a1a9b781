"""JSON of objects that other people write, however deep they nest it.

A field of any type, such as a Pod template's, may be deeper than parsers take: msgspec and Python's json fail
before 1,000 levels. One such object must not stop the operator for all others. What is deeper than
any field of Kubernetes becomes null.
"""

import re
from typing import Any

import msgspec

MAX_DEPTH = 200
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')


def load_json(raw: bytes) -> Any:
    """Parse JSON. Raises ValueError."""
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        return msgspec.json.decode(_cut_text(raw))


def dump_json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except RecursionError:
        return msgspec.json.encode(_cut(value, MAX_DEPTH))


def _cut(value: Any, levels: int) -> Any:
    if not isinstance(value, dict | list):
        return value
    if not levels:
        return None
    if isinstance(value, list):
        return [_cut(each, levels - 1) for each in value]
    return {name: _cut(each, levels - 1) for name, each in value.items()}


def _cut_text(raw: bytes) -> bytes:
    cut, depth, start = bytearray(), 0, 0
    for token in _TOKENS.finditer(raw):
        if token[0] in (b"[", b"{"):
            depth += 1
            if depth == MAX_DEPTH + 1:
                cut += raw[start : token.start()] + b"null"
        elif token[0] in (b"]", b"}"):
            if depth == MAX_DEPTH + 1:
                start = token.end()
            depth -= 1
    return bytes(cut + raw[start:])
