"""A private /dev/shm for a worker: its files are bounded, no other process sees them, and they end with the worker.

It needs a mount namespace: for root with CAP_SYS_ADMIN directly, else in a user namespace, which containers usually do
not allow. Invariant: the process keeps its user and group.
"""

from __future__ import annotations

import ctypes
import os

from rljob_reward.worker.sandbox.system import libc_call, raise_errno

PATH = "/dev/shm"
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
_MAX_FILES = 1 << 16


def make_private(max_mib: int, *, may_map_user: bool) -> None:
    """Mount an empty tmpfs. Raise OSError if that is not possible here."""
    uid, gid = os.getuid(), os.getgid()
    if libc_call("unshare", _CLONE_NEWNS) != 0:
        if not may_map_user or libc_call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS) != 0:
            raise_errno("unshare")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")  # else the mount would appear outside, too
    _mount("shm", PATH, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={max_mib}m,nr_inodes={_MAX_FILES},mode=1777")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    texts = [ctypes.c_char_p(text.encode()) for text in (source, target, kind, options)]
    if libc_call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3]) != 0:
        raise_errno(f"mount {target}")
