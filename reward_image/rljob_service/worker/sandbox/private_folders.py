"""A private /dev/shm and a private /tmp for a worker: no other process sees their files, which end with the worker.

Both need a mount namespace: for root with CAP_SYS_ADMIN directly, else in a user namespace, which containers usually do
not allow. /dev/shm is an empty tmpfs, /tmp a folder of the worker. Invariants: the process keeps its user and group;
what it still sees of the machine's /tmp cannot be written.
"""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable, Iterator

from rljob_service.worker.sandbox.system import libc_call, raise_errno, syscall

SHARED_MEMORY = "/dev/shm"
TEMPORARY = "/tmp"
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2
_MAX_FILES = 1 << 16
_MOUNT_SETATTR = 442  # the same on every architecture
_AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = -100, 0x8000, 1


def enter_namespace(*, may_map_user: bool) -> None:
    """Let mounts of this process concern it alone. Raise OSError if that is not possible here."""
    uid, gid = os.getuid(), os.getgid()
    if libc_call("unshare", _CLONE_NEWNS) != 0:
        if not may_map_user or libc_call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS) != 0:
            raise_errno("unshare")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")  # else the mounts would appear outside, too


def mount_shared_memory(max_bytes: int) -> None:
    """Mount an empty tmpfs at /dev/shm. Raise OSError if that is not possible here."""
    options = f"size={max_bytes},nr_inodes={_MAX_FILES},mode=1777"
    _mount("shm", SHARED_MEMORY, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def mount_temporary(folder: str, own: str, visible: Iterable[str]) -> None:
    """Mount `folder` at /tmp. Of the machine's /tmp, keep the folder `own`, and the paths `visible`, which become
    read-only. Raise OSError if that is not possible here."""
    root = os.path.realpath(TEMPORARY)
    kept = list(outermost(below(root, visible)))
    with contextlib.ExitStack() as stack:

        def hold(path: str) -> int:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            return descriptor

        # Held: once the folder is mounted, their paths lead elsewhere.
        sources = [(path, hold(path)) for path in kept]
        owns = [(path, hold(path)) for path in below(root, [own])]
        _mount(folder, root, "", _MS_BIND | _MS_REC, "")
        try:
            for path, source in sources:
                _keep(path, source)
                _make_read_only(path)
            for path, source in owns:
                _keep(path, source)
        except OSError:
            libc_call("umount2", ctypes.c_char_p(root.encode()), _MNT_DETACH)
            raise


def below(root: str, paths: Iterable[str]) -> Iterator[str]:
    """Yield the existing paths that lead below `root`, without links."""
    for path in paths:
        resolved = os.path.realpath(path)
        if resolved.startswith(f"{root}/") and os.path.exists(resolved):
            yield resolved


def outermost(paths: Iterable[str]) -> Iterator[str]:
    """Yield the paths that are not below others."""
    last = ""
    for path in sorted(set(paths), key=lambda each: each.split("/")):
        if not last or not path.startswith(f"{last}/"):
            yield path
            last = path


def _keep(path: str, source: int) -> None:
    """Mount what the descriptor `source` refers to at its old path."""
    held = f"/proc/self/fd/{source}"
    is_folder = os.path.isdir(held)
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        with open(path, "ab"):
            pass
    _mount(held, path, "", _MS_BIND | _MS_REC, "")


def _make_read_only(path: str) -> None:
    attributes = struct.pack("=QQQQ", _ATTR_RDONLY, 0, 0, 0)
    name = ctypes.create_string_buffer(os.fsencode(path))
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    arguments = _AT_FDCWD, ctypes.addressof(name), _AT_RECURSIVE, ctypes.addressof(buffer), len(attributes)
    if syscall(_MOUNT_SETATTR, *arguments) != 0:
        raise_errno(f"mount_setattr {path}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    texts = [ctypes.c_char_p(os.fsencode(text)) for text in (source, target, kind, options)]
    if libc_call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3]) != 0:
        raise_errno(f"mount {target}")
