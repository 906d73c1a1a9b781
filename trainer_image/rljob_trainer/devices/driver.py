"""The version of NVIDIA's driver on this node. Needs neither torch nor NVML: it also explains why these find no GPU."""

from __future__ import annotations

import re
from pathlib import Path

DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""Of the kernel module. Containers see it without NVIDIA's runtime, too."""
_VERSION = re.compile(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", re.MULTILINE)


def read_driver_version(path: Path = DRIVER_FILE) -> str | None:
    """Return the version, such as 580.65.06; None if the node has no driver."""
    try:
        found = _VERSION.search(path.read_text())
    except OSError:
        return None
    return found[1] if found else None
