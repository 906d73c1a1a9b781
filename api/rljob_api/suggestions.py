"""What a name that does not exist may have meant. Standard library only: workers import it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return `did you mean NAME?` with the nearest of the known names, or `otherwise` if none is near."""
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"did you mean {near[0]}?" if near else otherwise
