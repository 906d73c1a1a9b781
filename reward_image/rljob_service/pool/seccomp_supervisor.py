"""Answers to a worker's seccomp notifications: may this process start another, signal or adjust that one, or connect.

Owns one listener (seccomp_unotify(2)). Each start counts against the worker's limit until a scan of /proc shows which
processes have ended. Over the limit the whole worker is killed: its request then fails with a clear reason, unlike
after a failing fork(). Once the listener is closed, further calls fail, so a dead worker's remains cannot multiply.

A worker without network may connect to its own Unix sockets, such as those of multiprocessing.Manager. A filter cannot
read the path of connect(), and the process could change the path after the server has read it. So the
server connects a socket itself and replaces the process's with it. Invariant: the path is below the worker's scratch
directory, or in its private /tmp, when it is connected.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from rljob_service.pool import process_marks
from rljob_service.worker.sandbox import seccomp
from rljob_service.worker.sandbox.private_folders import TEMPORARY
from rljob_service.worker.sandbox.seccomp import BLOCKED_ERRNO, numbers

_FAMILY = struct.Struct("=H")

_MAX_ADDRESS_BYTES = 110


_IOCTL_RECEIVE, _IOCTL_SEND, _IOCTL_ADD_DESCRIPTOR = 0xC0502100, 0xC0182101, 0x40182103
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")  # id, pid, flags, nr, arch, ip, arguments
_RESPONSE = struct.Struct("=QqiI")  # id, value, error, flags
_DESCRIPTOR = struct.Struct("=QIIII")  # id, flags, the server's descriptor, the process's, its flags
_CONTINUE, _REPLACE = 1, 1
_CLONE_THREAD = 0x10000

_NAMES = {number: name for name, number in numbers().items()}


@dataclass(eq=False)
class SeccompSupervisor:
    _listener: int
    _mark: int
    _scratch: str
    _max_processes: int
    _on_excess: Callable[[], None]
    _forking_pid: int | None = None
    """A worker that forks for each request, and takes these processes' exit status itself."""
    _upper_bound: int = 0
    """At most this many processes and threads exist, not counting the worker's main thread."""
    has_spawned: bool = False
    has_new_processes: bool = False
    """Whether a process, not only a thread, was started since the owner reset this."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._respond)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        os.close(self._listener)

    def _respond(self) -> None:
        notification = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(self._listener, _IOCTL_RECEIVE, notification)
        except OSError:
            return  # the caller was killed meanwhile
        number, pid, _, call, _, _, *arguments = _NOTIFICATION.unpack(notification)
        name = _NAMES.get(call, "")
        if name == "connect":
            error, flags = self._connect(number, pid, arguments), 0
        else:
            error = self._decide(name, pid, arguments)
            flags = 0 if error else _CONTINUE
        response = _RESPONSE.pack(number, 0, -error, flags)
        with contextlib.suppress(OSError):  # a signal interrupted the call; the process may repeat it
            fcntl.ioctl(self._listener, _IOCTL_SEND, bytearray(response))

    def _decide(self, call: str, caller: int, arguments: list[int]) -> int:
        """Return 0 to allow the call, else the errno that it fails with."""
        if call in seccomp.SPAWNING:
            is_thread = call == "clone" and bool(arguments[0] & _CLONE_THREAD)
            self.has_new_processes |= not is_thread and caller != self._forking_pid
            return self._decide_spawn()
        target = struct.unpack("=i", struct.pack("=I", arguments[seccomp.PID_ARGUMENT[call]] & 0xFFFFFFFF))[0]
        return 0 if self._is_own(target) else errno.EPERM

    def _connect(self, notification: int, pid: int, arguments: list[int]) -> int:
        """Connect in place of the process. Return 0, or the errno that its call fails with."""
        descriptor, address, num_bytes = arguments[:3]
        try:
            with connect_below(self._scratch, pid, address, num_bytes) as connection:
                fields = notification, _REPLACE, connection.fileno(), descriptor & 0xFFFFFFFF, os.O_CLOEXEC
                fcntl.ioctl(self._listener, _IOCTL_ADD_DESCRIPTOR, bytearray(_DESCRIPTOR.pack(*fields)))
        except OSError as error:
            return error.errno or errno.EPERM
        return 0

    def _decide_spawn(self) -> int:
        self.has_spawned = True
        self._upper_bound += 1
        if self._upper_bound <= self._max_processes:
            return 0
        self._upper_bound = process_marks.count_threads(self._mark)  # includes the main thread, not the new one
        if self._upper_bound <= self._max_processes:
            return 0
        self._on_excess()
        return errno.EAGAIN

    def _is_own(self, target: int) -> bool:
        if target > 0:
            return process_marks.mark_of(target) == self._mark
        # A group cannot span sessions, and every worker starts a session: one member decides for its group.
        return any(_group_of(process.pid) == -target for process in process_marks.find_processes(self._mark))


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


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
