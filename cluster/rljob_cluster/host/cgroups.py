"""The cgroup hierarchies of this machine: v1, v2 or hybrid (v1 controllers with a v2 tree for processes only)."""

from collections.abc import Sequence
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def cgroup_controllers() -> Sequence[Path]:
    """The hierarchies of cgroup v1, or the one of v2."""
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    folders = [procs.parent for procs in sorted(_CGROUPS.glob("*/cgroup.procs"))]
    return [folder for folder in folders if not folder.is_symlink() and folder.name != "unified"]


def find_cgroups(name: str) -> list[Path]:
    """The cgroups of this name in all hierarchies, in the v2 tree of hybrid mode too."""
    return [path for path in (_CGROUPS / name, *_CGROUPS.glob(f"*/{name}")) if path.is_dir()]


def is_hybrid() -> bool:
    return (_CGROUPS / "unified/cgroup.procs").exists()
