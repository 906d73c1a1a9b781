"""Modules outside of packages, such as examples."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def load_module(file: Path) -> ModuleType:
    """Import a file under a name that contains its folder."""
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
