"""Kubernetes quantities: 500m, 2, 16Gi. Standard library only: workers import it."""

import re
from decimal import Decimal
from typing import Final

_QUANTITY: Final = re.compile(r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
_EXPONENTS: Final = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY: Final = "KMGTPE"
_MAX_EXPONENT: Final = 18


def parse_quantity(value: str | float) -> Decimal | None:
    """Return a Kubernetes quantity as a number; None if it is none."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        return None
    sign, digits, suffix = match.group(1), match.group(2), match.group(3) or ""
    number = Decimal(f"{sign}{digits}")
    if suffix.endswith("i"):
        return number * Decimal(1024) ** (_BINARY.index(suffix[0]) + 1)
    if suffix[1:]:
        exponent = int(suffix[1:])
        return number.scaleb(exponent) if abs(exponent) <= _MAX_EXPONENT else None
    return number.scaleb(_EXPONENTS[suffix])


def show_bytes(num_bytes: int) -> str:
    """Return GiB for people; MiB below a tenth of a GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 0.1 * 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def format_bytes(num_bytes: int) -> str:
    """Return a quantity with the largest binary suffix that loses nothing: 2Gi, 1536Mi, 1000."""
    power = 0
    while num_bytes and num_bytes % 1024 == 0 and power < len(_BINARY):
        num_bytes, power = num_bytes // 1024, power + 1
    return f"{num_bytes}{_BINARY[power - 1]}i" if power else str(num_bytes)
