"""Raw system calls by ctypes, for what the standard library does not offer. Errors are OSErrors that name the call."""

import ctypes
import os
import signal
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(number: int, *arguments: int) -> int:
    """Return the call's result; -1 with errno set on failure. Arguments are integers and addresses."""
    return int(_libc.syscall(ctypes.c_long(number), *(ctypes.c_long(argument) for argument in arguments)))


def libc_call(name: str, *arguments: Any) -> int:
    """Return the result of a function of the C library; -1 with errno set on failure."""
    return int(getattr(_libc, name)(*arguments))


def libc_prctl(option: int, *arguments: int) -> int:
    four = (*arguments, 0, 0, 0, 0)[:4]
    return int(_libc.prctl(option, *(ctypes.c_ulong(argument) for argument in four)))


def die_with(parent_pid: int) -> None:
    """Make the kernel kill this process when the server dies. The kernel resets this when the user changes."""
    libc_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the server died before the line above
        os._exit(1)


def raise_errno(call: str) -> NoReturn:
    code = ctypes.get_errno()
    raise OSError(code, f"{call}: {os.strerror(code)}")
