"""One download of a weight file, in a thread: from the socket into the mapped file, and hashed in the cache."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from rljob_api.errors import TransientError
from rljob_trainer.weights.file_hash import hash_chunk, hash_file, split

_CONNECT_SECONDS = 10
_READ_SECONDS = 60
_REPORTED_CHUNKS = 4
_REASON_BYTES = 500


class Download:
    def __init__(self, url: str, token: str, record_received: Callable[[int], None]) -> None:
        """`record_received` gets the number of bytes so far."""
        self._url, self._record_received = url, record_received
        self._headers = {"Authorization": f"Bearer {token}"}
        address = urlsplit(url)
        assert address.hostname is not None
        self._path = address.path
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=_CONNECT_SECONDS)
        self._is_stopped = False

    def run(self, target: memoryview) -> str:
        """Fill `target` and return the file's hash. TransientError if the server has no file of this size."""
        try:
            self._connection.connect()
            self._connection.sock.settimeout(_READ_SECONDS)
            if self._is_stopped:
                raise ConnectionAbortedError("stopped")
            self._connection.request("GET", self._path, headers=self._headers)
            response = self._connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                reason = response.read(_REASON_BYTES).decode(errors="replace")
                raise TransientError(f"{self._url}: HTTP {response.status}: {reason}")
            if response.length != len(target):
                raise TransientError(f"{self._url}: expected {len(target)} bytes, got {response.length}")
            return self._receive(response, target)
        except (OSError, http.client.HTTPException) as error:
            raise TransientError(f"{self._url}: {type(error).__name__}: {error}") from error
        finally:
            self._connection.close()

    def stop(self) -> None:
        """Make run() end soon, in another thread."""
        self._is_stopped = True
        if (open_socket := self._connection.sock) is not None:
            with contextlib.suppress(OSError):  # it is closed already
                open_socket.shutdown(socket.SHUT_RDWR)

    def _receive(self, response: http.client.HTTPResponse, target: memoryview) -> str:
        hashes, received = [], 0
        for chunk in split(target):
            end = received + len(chunk)
            while received < end:
                num_bytes = response.readinto(target[received:end])
                if not num_bytes:
                    raise TransientError(f"{self._url}: the response ended after {received} bytes")
                received += num_bytes
            hashes.append(hash_chunk(chunk))
            if len(hashes) % _REPORTED_CHUNKS == 0 or received == len(target):
                self._record_received(received)
        return hash_file(hashes)
