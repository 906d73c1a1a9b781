"""Messages between a rank and an engine of its Pod: JSON over a Unix socket, one with a file descriptor.

The socket is in a folder of the Pod's program that only its user can enter, and the receiver says the job's token
first. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any, cast

_LENGTH_BYTES = 4
_SEND_SECONDS = 30.0
_MAX_BYTES = 64 << 20
"""The longest message: a bucket has thousands of parts at most."""


class ClosedError(Exception):
    """The other side has ended, does not answer in time, or says something else."""


class Channel:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.descriptor: int | None = None
        """That came with a message. Its reader closes it."""

    @classmethod
    def connect(cls, path: Path, seconds: float) -> Channel:
        """Raise ClosedError if no rank listens."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(seconds)
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            raise ClosedError(f"{path}: {error.strerror or error}") from error
        return cls(connection)

    def close(self) -> None:
        self._socket.close()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def is_closed(self) -> bool:
        """Whether the other side has ended; it has nothing to say now."""
        self._socket.setblocking(False)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, message: Any, descriptor: int | None = None) -> None:
        text = json.dumps(message, separators=(",", ":")).encode()
        data = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        self._socket.settimeout(_SEND_SECONDS)
        try:
            sent = 0 if descriptor is None else socket.send_fds(self._socket, [data], [descriptor])
            if sent < len(data):  # an empty send would fail if the other side has answered and ended
                self._socket.sendall(data[sent:])
        except OSError as error:
            raise ClosedError(f"the other side has ended: {error}") from error

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for a message."""
        self._socket.settimeout(seconds)
        try:
            length = int.from_bytes(self._read(_LENGTH_BYTES), "little")
            if length > _MAX_BYTES:
                raise ClosedError(f"a message of {length} bytes")
            return cast(dict[str, Any], json.loads(self._read(length)))
        except TimeoutError as error:
            raise ClosedError(f"no answer for {seconds:.0f} s") from error
        except (OSError, ValueError) as error:
            raise ClosedError(f"the other side has ended: {error}") from error

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            part, descriptors, _, _ = socket.recv_fds(self._socket, num_bytes - len(data), 1, socket.MSG_CMSG_CLOEXEC)
            if descriptors:
                self.descriptor = descriptors[0]
            if not part:
                raise ClosedError("the other side has ended")
            data += part
        return bytes(data)
