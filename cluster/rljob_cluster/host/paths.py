"""Folders of the project, of its cache, and of the cluster's state."""

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljob" / "cluster"


def state_folder() -> Path:
    return Path(os.environ.get("RLJOB_CLUSTER_DIR") or ".cluster").resolve()


def find_uv() -> str | None:
    """The uv on PATH, else the one that the Makefile installs."""
    return shutil.which("uv") or shutil.which(str(ROOT / ".tools/bin/uv"))
