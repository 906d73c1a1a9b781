"""The blocks and commands of a page of docs/, so that tests check what it shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from tests.paths import ROOT

_CONTROL = {"do", "done", "then", "fi"}


def read_blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in order. `page` is relative to docs/."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.S | re.M)


def read_objects(page: str, kind: str | None) -> list[dict[str, Any]]:
    """Return the YAML objects of a kind, or with None those without a kind: parts of a manifest."""
    found = [each for block in read_blocks(page, "yaml") for each in yaml.safe_load_all(block)]
    return [each for each in found if each.get("kind") == kind]


def read_object(page: str, kind: str) -> dict[str, Any]:
    [found] = read_objects(page, kind)
    return found


def read_commands(page: str) -> list[list[str]]:
    """Return each simple command of the shell blocks as its arguments: of pipes, loops and $(...), what they run."""
    return [command for block in read_blocks(page, "bash") for command in _split(block)]


def _split(block: str) -> Iterator[list[str]]:
    for line in block.replace("\\\n", " ").splitlines():
        inner = re.findall(r"\$\((.*)\)", line)
        for part in (re.sub(r"\$\(.*\)", "OUTPUT", line), *inner):
            lexer = shlex.shlex(part, posix=True, punctuation_chars="|;&")
            lexer.whitespace_split = True
            yield from _divide(list(lexer))


def _divide(words: list[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= set("|;&"):
            if command and "=" not in command[0] and command[0] != "for":
                yield command
            command = []
        elif command or word not in _CONTROL:
            # A command may begin with variables.
            command = [] if command and "=" in command[0] and len(command) == 1 else command
            command.append(word)
