"""Writes that survive a crash of the process or the node. Owns no names of files."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write a file atomically: after a crash of the process or the node it is complete, or it does not exist."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    rename_durably(temporary, path)


def rename_durably(temporary: Path, path: Path) -> None:
    """Flush a file to the disk and rename it, and flush the rename."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
