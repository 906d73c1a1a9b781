"""A rank's side of a run's folder that only the head sees: files are streamed to the head and read back in ranges.

Invariant: after `create` the head has the whole file on its disk, or an error was raised. Neither side holds a file in
memory. Synchronous, because ranks are.

The head alone owns the folder: it creates, completes and deletes what is in it. Ranks write into it if their Pod mounts
the same claim, or runs on the same machine; others send their files to the head. Invariant: a rank never takes a folder
in its Pod for the run's, because it compares the id that is stored in the folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import quote, urlsplit

from rljob_api.errors import TransientError

_BUFFER_BYTES = 4 << 20
_TIMEOUT_SECONDS = 600.0
"""For one send or receive: the head answers once its disk has the file. If the head has died, the worker ends the
rank."""


class HeadUnreachableError(TransientError):
    """The connection to the head failed, or changed the data."""


@dataclass(frozen=True)
class RemoteFolder:
    """A folder of the run, by its path below the run's folder."""

    url: str
    """Address of the run's folder."""
    path: str
    token: str = field(repr=False)

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(self.url, f"{self.path}/{name}", self.token)

    def __str__(self) -> str:
        return f"{self.path} on the head"

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[io.RawIOBase]:
        """Yield a stream to a new file, which exists once the context has ended without an error."""
        with self._connect(name) as connection:
            stream = _UploadStream(connection)
            connection.putrequest("PUT", self._target(name))
            connection.putheader("Authorization", f"Bearer {self.token}")
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()
            yield stream
            stream.finish()
            expected, received = [stream.tell(), stream.checksum], json.loads(self._check(connection, name, 200))
            if expected != received:
                raise HeadUnreachableError(f"{self / name}: sent {expected} (bytes, CRC-32), it has {received}")

    def read(self, name: str) -> bytes:
        """Return a small file. Raise FileNotFoundError if it does not exist."""
        with self._connect(name) as connection:
            self._request(connection, name, {})
            return self._check(connection, name, 200)

    def stream(self, name: str) -> Iterator[bytes]:
        """Yield a file in pieces. Raise FileNotFoundError if it does not exist."""
        with self._connect(name) as connection:
            self._request(connection, name, {})
            response = connection.getresponse()
            _check_status(response, f"{self / name}", 200)
            while piece := response.read(_BUFFER_BYTES):
                yield piece
            if response.length:  # http.client ends a cut answer without an error
                raise HeadUnreachableError(f"{self / name}: the answer lacks {response.length} bytes")

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[RemoteFile]:
        with self._connect(name) as connection:
            yield RemoteFile(self, name, connection)

    def upload(self, folder: Path) -> None:
        """Send all files of a folder of this machine, with their folders."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            with path.open("rb") as file, self.create(path.relative_to(folder).as_posix()) as stream:
                while chunk := file.read(_BUFFER_BYTES):
                    stream.write(chunk)

    @contextlib.contextmanager
    def _connect(self, name: str) -> Iterator[HTTPConnection]:
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=_TIMEOUT_SECONDS)
        try:
            yield connection
        except FileNotFoundError:
            raise
        except (OSError, HTTPException) as error:
            raise HeadUnreachableError(f"{self / name}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _target(self, name: str) -> str:
        return quote(f"{urlsplit(self.url).path}/{self.path}/{name}")

    def _request(self, connection: HTTPConnection, name: str, headers: dict[str, str]) -> None:
        connection.request("GET", self._target(name), headers={"Authorization": f"Bearer {self.token}", **headers})

    def _check(self, connection: HTTPConnection, name: str, expected: int) -> bytes:
        response = connection.getresponse()
        _check_status(response, f"{self / name}", expected)
        return response.read()


def _check_status(response: HTTPResponse, what: str, expected: int) -> None:
    if response.status == 404:
        raise FileNotFoundError(f"{what} does not exist")
    if response.status != expected:
        # The text of a full disk is that of the head.
        raise TransientError(f"{what}: HTTP {response.status}: {response.read().decode(errors='replace')}")


@dataclass
class RemoteFile:
    """Reads ranges of one file over one connection."""

    folder: RemoteFolder
    name: str
    connection: HTTPConnection

    def read_range(self, offset: int, length: int) -> bytes:
        self.folder._request(self.connection, self.name, {"Range": f"bytes={offset}-{offset + length - 1}"})
        body = self.folder._check(self.connection, self.name, 206)
        if len(body) != length:
            raise HeadUnreachableError(f"{self.folder / self.name}: {len(body)} bytes instead of {length}")
        return body


class _UploadStream(io.RawIOBase):
    """The body of a request in chunked encoding. Small writes are collected."""

    def __init__(self, connection: HTTPConnection) -> None:
        self._connection, self._pending, self._num_bytes = connection, bytearray(), 0
        self.checksum = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._num_bytes

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        self._num_bytes += len(view)
        if len(self._pending) + len(view) < _BUFFER_BYTES:
            self._pending += view
        else:
            self._send_pending()
            self._send(view)
        return len(view)

    def finish(self) -> None:
        self._send_pending()
        self._connection.send(b"0\r\n\r\n")

    def _send_pending(self) -> None:
        self._send(memoryview(self._pending))
        self._pending = bytearray()

    def _send(self, data: memoryview) -> None:
        if not data:  # an empty chunk would end the body
            return
        self.checksum = zlib.crc32(data, self.checksum)
        self._connection.send(f"{len(data):x}\r\n".encode())
        self._connection.send(data)
        self._connection.send(b"\r\n")


def reach(run: RunFolder, folder: Path, token: str) -> Path | RemoteFolder:
    """Return a folder of the run as this process reaches it: itself, or through the head."""
    if run.is_visible():
        return folder
    return RemoteFolder(run.url, folder.relative_to(run.path).as_posix(), token)


FILE_ID = ".run-id"
EXPORT_PARTIAL = ".export.partial"
"""Folder of the run in which rank 0 writes the export."""


@dataclass(frozen=True)
class RunFolder:
    """The run's folder on the head, as the ranks get it."""

    path: Path
    id: str
    url: str
    """Where the head serves the files of the folder."""

    def is_visible(self) -> bool:
        """Whether this process sees the folder, and not another one at its path."""
        try:
            return (self.path / FILE_ID).read_text() == self.id
        except OSError:
            return False


def read_run_id(run_dir: Path) -> str:
    """Return the id of the run's folder. A folder without one, such as a new emptyDir, gets it."""
    if not (run_dir / FILE_ID).exists():
        write_run_id(run_dir, secrets.token_hex(8))
    return (run_dir / FILE_ID).read_text()


def write_run_id(run_dir: Path, run_id: str) -> None:
    """Make a folder that of a run which was elsewhere before."""
    partial = run_dir / f"{FILE_ID}.partial"
    partial.write_text(run_id)
    partial.replace(run_dir / FILE_ID)
