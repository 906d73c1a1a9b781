"""Plain YAML scalars as kubectl reads them: YAML 1.1 as go-yaml has it, and then JSON.

So `y` is true, `12:30` is text, `1e3` is 1000, and a date is text. Invariant: one table for reading and for writing, so
that what we write is what kubectl and we read.
"""

import re
from typing import Any

import yaml

_BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float"))
_NULL, _TEXT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"
_WORDS = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
}
_PATTERNS = (
    (_NULL, r"~|null|Null|NULL|"),
    (_BOOL, "|".join(_WORDS)),
    (_INT, r"[-+]?(?:0[bB]_*[-+]?[01][01_]*|0[xX]_*[0-9a-fA-F][0-9a-fA-F_]*|0[oO]?[0-7_]+|0|[1-9][0-9_]*)"),
    (_FLOAT, r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"),
    (_FLOAT, r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
)
_COMPILED = [(tag, re.compile(pattern)) for tag, pattern in _PATTERNS]
_LONG_INT_DIGITS = 20


def resolve(text: str) -> str:
    """Return the tag of a plain scalar."""
    return next((tag for tag, pattern in _COMPILED if pattern.fullmatch(text)), _TEXT)


def is_text(text: str) -> bool:
    """Whether a scalar without quotes is text for kubectl."""
    return resolve(text) == _TEXT


def construct(node: yaml.ScalarNode) -> Any:
    """Return the value of a resolved scalar. Raises ValueError for a number that JSON does not have."""
    text = node.value
    if node.tag == _BOOL and text in _WORDS:
        return _WORDS[text]
    if node.tag == _INT:
        return _read_int(text.replace("_", ""))
    number = float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    # JSON has one type of number: 3.0 and 1e3 are whole.
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def _read_int(text: str) -> int | float:
    sign, digits = (-1 if text[0] == "-" else 1), text.lstrip("+-").lower()
    if digits.startswith("0b"):
        return sign * int(digits[2:], 2)
    if digits.startswith("0x"):
        return sign * int(digits[2:], 16)
    if digits.startswith("0") and digits != "0":
        return sign * int(digits.removeprefix("0o") or "0", 8)
    return sign * int(digits) if len(digits) < _LONG_INT_DIGITS else sign * float(digits)
