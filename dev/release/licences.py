"""The table of the licences of all packages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from email.message import Message
from typing import Any

_CLASSIFIER = "License ::"
_UNKNOWN = "not installed where this table was made: see the package"
_VAGUE = ("OSI Approved", "Other/Proprietary License")
_LONGEST = 60
"""The field License has a whole text in some packages."""


def find_licence(metadata: Message | Any) -> str:
    """Return the licence that a package's metadata names: an SPDX expression, else a classifier, else a short name."""
    if expression := metadata.get("License-Expression"):
        return str(expression)
    lasts = [c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier") or [] if c.startswith(_CLASSIFIER)]
    named = [last for last in lasts if last not in _VAGUE]
    text = (metadata.get("License") or "").strip().splitlines()
    short = text[0] if text and len(text[0]) <= _LONGEST else ""
    return ", ".join(named) or short or "not named in its metadata: see its files"


def build_table(packages: Mapping[str, Mapping[str, str]], licences: Mapping[str, str | None]) -> str:
    """Return Markdown: a row for each version of a package. `packages` has versions by name by part."""
    parts: dict[tuple[str, str], list[str]] = {}
    for part, found in packages.items():
        for item in found.items():
            parts.setdefault(item, []).append(part)
    rows = [
        f"| {name} | {version} | {(licences.get(name) or _UNKNOWN).replace('|', '/')} | {', '.join(where)} |"
        for (name, version), where in sorted(parts.items())
    ]
    header = (
        "# Licences\n\nRLJob is licensed under Apache-2.0. It installs the packages below, each under its own licence,"
        " as its\nmetadata names it. Images also have Debian's packages: /usr/share/doc/*/copyright.\n"
    )
    return "\n".join([header, "| package | version | licence | part |", "|---|---|---|---|", *rows]) + "\n"
