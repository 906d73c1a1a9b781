"""Relative links of a page, from what they name in the repository to what the site has in its place."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator

_CODE_BLOCK = re.compile(r"^([ ]*(?:```|~~~).*?^[ ]*(?:```|~~~)[ ]*$)", re.S | re.M)
_LINK = re.compile(r"`[^`\n]+`|(?P<open>!?\[(?P<text>(?:[^\[\]`]|`[^`]*`)*)\]\()(?P<target>[^)\s]+)\)")

Place = Callable[[str], str | None]
"""The path on the site of a file or folder of the repository, or None if the site does not have it."""


def replace_links(text: str, page: str, place: Place) -> str:
    """Return the text of a page with links of the site. A link to what the site does not have becomes its text.

    `page` is the path of the page in the repository; its own place decides what the new links are relative to.
    """

    def replace(match: re.Match[str]) -> str:
        if not match["target"] or _is_kept(match["target"]):
            return match[0]
        name, hash_, anchor = match["target"].partition("#")
        found = place(resolve(page, name))
        if found is None:
            return match["text"]
        folder = posixpath.dirname(place(page) or page)
        anchor = hash_ + anchor if found.endswith(".md") else ""
        return f"{match['open']}{posixpath.relpath(found, folder)}{anchor})"

    parts = _CODE_BLOCK.split(text)
    return "".join(part if i % 2 else _LINK.sub(replace, part) for i, part in enumerate(parts))


def find_links(text: str) -> Iterator[str]:
    """Yield the targets of a page's links and images, without those in code."""
    for part in _CODE_BLOCK.split(text)[::2]:
        yield from (match["target"] for match in _LINK.finditer(part) if match["target"])


def resolve(page: str, name: str) -> str:
    """Return the path in the repository of what a page's link names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), name))


def _is_kept(target: str) -> bool:
    return "://" in target or target.startswith(("#", "mailto:"))
