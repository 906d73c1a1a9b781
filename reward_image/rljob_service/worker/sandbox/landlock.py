"""Landlock: writes only below the directories of the worker, no tracing or signalling of other processes.

A domain is inherited by what a worker starts and cannot be left. Tracing covers /proc/PID/environ and /proc/PID/mem:
the server's token, and other workers. Reads of a function are not restricted: it may read what its user may. Code of
the policy gets a further domain within that of its worker, which restricts reads, too.
"""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable

from rljob_service.worker.sandbox.system import raise_errno, syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_WRITE_FILE, _REMOVE_DIR, _REMOVE_FILE = 1 << 1, 1 << 4, 1 << 5
_MAKE = sum(1 << bit for bit in range(6, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_OF_FILES = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE
_SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1, 2

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
"""Not terminals: what is written to one can control it, and the user may have started the server there."""


def abi() -> int:
    """Return the ABI version of this kernel; 0 if it has no landlock."""
    return max(0, syscall(_CREATE_RULESET, 0, 0, _CREATE_RULESET_VERSION))


def restrict(writable: Iterable[str]) -> tuple[int, list[str]]:
    """Restrict this process: it writes only below `writable`. Return the active scopes, and what this kernel cannot
    enforce."""
    version = abi()
    if version == 0:
        return 0, ["landlock: missing here: files of this user elsewhere can be written, other workers traced"]
    scopes = _enter(version, writable, 0, ())
    lacking = [] if version >= 3 else ["landlock: before Linux 6.2 files of this user elsewhere can be truncated"]
    return scopes, lacking


def confine(writable: Iterable[str], readable: Iterable[str]) -> None:
    """Restrict this process within the domain of its worker: it writes only below `writable`, reads and executes only
    that and what is `readable`, and cannot trace or signal the worker. No effect where the kernel has no Landlock."""
    if version := abi():
        _enter(version, writable, _READ, readable)


def prepare(writable: Iterable[str]) -> int | None:
    """Return a descriptor with which enforce() restricts a process as restrict() does; None without Landlock."""
    version = abi()
    return _build(version, writable, 0, ())[0] if version else None


def enforce(ruleset: int) -> None:
    """Restrict this process."""
    if syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        raise_errno("landlock_restrict_self")


def _enter(version: int, writable: Iterable[str], reads: int, readable: Iterable[str]) -> int:
    """Enter a domain, and return its scopes. `reads`: the rights to read that it restricts."""
    ruleset, scopes = _build(version, writable, reads, readable)
    try:
        enforce(ruleset)
    finally:
        os.close(ruleset)
    return scopes


def _build(version: int, writable: Iterable[str], reads: int, readable: Iterable[str]) -> tuple[int, int]:
    """Return the descriptor of a ruleset, and its scopes."""
    writes = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE
    writes |= (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    scopes = (_SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL) if version >= 6 else 0
    ruleset = _create_ruleset(writes | reads, scopes)
    try:
        for path in writable:
            _allow(ruleset, path, writes | reads)
        for path in _DEVICES:
            _allow(ruleset, path, (writes | reads) & _OF_FILES)
        for path in readable:
            _allow(ruleset, path, reads)
    except OSError:
        os.close(ruleset)
        raise
    return ruleset, scopes


def _create_ruleset(access: int, scopes: int) -> int:
    # handled_access_fs, handled_access_net, scoped: older kernels know a shorter struct.
    attributes = struct.pack("QQQ", access, 0, scopes) if scopes else struct.pack("Q", access)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = syscall(_CREATE_RULESET, ctypes.addressof(buffer), len(attributes), 0)
    if ruleset < 0:
        raise_errno("landlock_create_ruleset")
    return ruleset


def _allow(ruleset: int, path: str, access: int) -> None:
    """Allow `access` below `path`; no effect if it does not exist."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES):
            return
        raise
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            access &= _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, descriptor), 12)
        if syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.addressof(rule), 0) != 0:
            raise_errno(f"landlock_add_rule for {path}")
    finally:
        os.close(descriptor)
