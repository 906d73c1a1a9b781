"""The sections of CHANGELOG.md. Pure."""

from __future__ import annotations

import re

_UNRELEASED = "## Unreleased\n"


def read_section(text: str, title: str) -> str:
    """Return what is below the heading that begins with `title`, up to the next; empty if there is none."""
    found = re.search(rf"(?ms)^## {re.escape(title)}(?: - [^\n]*)?\n(.*?)(?=^## |\Z)", text)
    return found[1].strip() if found else ""


def close_unreleased(text: str, version: str, date: str) -> str:
    """Return the changelog with what is unreleased below a heading for this version."""
    before, heading, after = text.partition(_UNRELEASED)
    assert heading, "find_problems finds entries below it"
    return f"{before}{heading}\n## {version} - {date}\n{after.lstrip()}"
