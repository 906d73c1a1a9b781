"""Parts of messages: the name that was meant, and lists that may be long. Standard library only: workers import it."""

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return `did you mean NAME?` with the nearest of the known names, or `otherwise` if none is near."""
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def list_some(texts: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Return the first `limit` texts, and how many others there are: `a, b and 3 more`."""
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return separator.join(texts[:limit]) + more
