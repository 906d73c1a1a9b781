"""Connections of a worker without network to its own Unix sockets, such as those of multiprocessing.Manager.

A filter cannot read the path of connect(), and the process could change the path after the server has read it. So the
server connects a socket itself and replaces the process's with it. Invariant: the path is below the worker's scratch
directory, or in its private /tmp, when it is connected.
"""

import os
import socket
import struct

from rljob_service.worker.sandbox.private_folders import TEMPORARY
from rljob_service.worker.sandbox.seccomp import BLOCKED_ERRNO

_FAMILY = struct.Struct("=H")
_MAX_ADDRESS_BYTES = 110


def connect_below(folder: str, pid: int, address: int, num_bytes: int) -> socket.socket:
    """Return a socket that is connected to the path at `address` in the memory of process or thread `pid`."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        content = memory.read(min(num_bytes, _MAX_ADDRESS_BYTES))
    path = content[_FAMILY.size :].split(b"\0", 1)[0].decode(errors="surrogateescape")
    is_path = len(content) > _FAMILY.size and _FAMILY.unpack_from(content)[0] == socket.AF_UNIX and path
    if not is_path:  # an abstract name, or another family
        raise OSError(BLOCKED_ERRNO, os.strerror(BLOCKED_ERRNO))
    absolute = os.path.join(os.readlink(f"/proc/{pid}/cwd"), path)
    descriptor = os.open(f"/proc/{pid}/root{absolute}", os.O_PATH | os.O_CLOEXEC)
    try:
        own = f"/proc/self/fd/{descriptor}"
        if not os.readlink(own).startswith(f"{folder}/") and not _is_in_private(pid, descriptor):
            raise OSError(BLOCKED_ERRNO, os.strerror(BLOCKED_ERRNO))
        return _connect(own)
    finally:
        os.close(descriptor)


def _is_in_private(pid: int, descriptor: int) -> bool:
    """Return whether the file is in the process's own /tmp, and not in what it still sees of the machine's."""
    folder = os.open(f"/proc/{pid}/root{TEMPORARY}", os.O_PATH | os.O_CLOEXEC)
    try:
        mount = _mount_of(folder)
    finally:
        os.close(folder)
    return _mount_of(descriptor) == mount and not os.path.samefile(f"/proc/{pid}/root{TEMPORARY}", TEMPORARY)


def _mount_of(descriptor: int) -> str:
    """Return the id of the mount that an open file is in."""
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        return next(line.split()[1] for line in file if line.startswith("mnt_id:"))


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)  # a full backlog must not block the server
        connection.connect(path)
        connection.setblocking(True)
    except OSError:
        connection.close()
        raise
    return connection
