"""The blocks of the README, so that tests run what it shows."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from tests.paths import ROOT


class Block(NamedTuple):
    language: str
    """Empty for drawings."""
    text: str


def read_blocks() -> list[Block]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [Block(*match) for match in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)]


def read_commands() -> list[list[str]]:
    """Return each line of the shell blocks as its arguments, without comments."""
    lines = [line for block in read_blocks() if block.language == "bash" for line in block.text.splitlines()]
    return [command for command in (shlex.split(line, comments=True) for line in lines) if command]


def read_smallest_job() -> str:
    (job,) = (block.text for block in read_blocks() if block.language == "yaml")
    return job
