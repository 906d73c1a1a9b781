"""Raw system calls by ctypes, for what the standard library does not offer. Errors are OSErrors that name the call."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(number: int, *arguments: int) -> int:
    """Return the call's result; -1 with errno set on failure. Arguments are integers and addresses."""
    return int(_libc.syscall(ctypes.c_long(number), *(ctypes.c_long(argument) for argument in arguments)))


def libc_prctl(option: int, *arguments: int) -> int:
    four = (*arguments, 0, 0, 0, 0)[:4]
    return int(_libc.prctl(option, *(ctypes.c_ulong(argument) for argument in four)))


def raise_errno(call: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"{call}: {os.strerror(code)}")
