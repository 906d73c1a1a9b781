"""One download of a weight file, in threads: from sockets into the mapped file, and verified in the cache.

    publisher --(hashes of all chunks)--> 2 threads: parts of the file, or what changed in them
    peers ----(hashes of what they have)--> 2 threads: parts that they have         chooses: Sources

The hashes of verified chunks are entered in what other replicas see, at once. Invariant: run()
returns only if the file has the announced hash. An error of a peer costs the part that it sent, one of the publisher
the download.

The file has the version before, if that was verified: a part is first requested as what changed since then, and any
further time whole.

`Sources` is pure: which part a receiver requests next, from the publisher or from a peer. A peer is another replica
that downloads the same file, or has it. Parts are requested from the publisher in random order, so that receivers that
begin together soon have different parts for each other. A peer that fails once (an error, a wrong hash, too slow) is
not used again for this file. Invariants: each part is in flight at most once, so that no thread writes where another
one has verified. Every part can be requested from the publisher, whatever peers do.

`SharedDownload` serves other replicas the parts that this one has of the file that it downloads, or has downloaded.
Leaves the choice of sources to the receiver, and the list of replicas to the head. A replica that reads the publisher's
file in place serves nothing: so do the others on that machine.
"""

import contextlib
import http.client
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar, cast
from urllib.parse import urlsplit

from rljob_api.errors import TransientError
from rljob_api.wire.contract import PORT_WEIGHTS
from rljob_api.wire.discovery import listening_port
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.weights import deltas
from rljob_trainer.weights.checksum import CHUNK_BYTES, HASH_BYTES, hash_chunk, hash_file
from rljob_trainer.weights.file_server import BASE_HEADER, LENGTH_BYTES, ServedFile, WeightServer


class SharedDownload:
    """Serves the download from construction to close()."""

    def __init__(self, host: str = "", token: str = "") -> None:
        """Without a host, serve nothing; nor if the port is in use, as by a trainer in the node's network."""
        self.address = ""
        """Where other replicas may request parts."""
        self._current: tuple[str, ServedFile] | None = None
        """Its name, and the file."""
        self._server: WeightServer | None = None
        if host:
            address = f"{host}:{listening_port(PORT_WEIGHTS)}"
            try:
                self._server = WeightServer(host, token, self._find)
                self.address = address
            except OSError as error:
                logger.warning("weights are not shared with other replicas: %s: %s", address, error)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def begin(self, manifest: WeightManifest, data: memoryview, base: str) -> ServedFile:
        """Serve the file mapped at `data` from now on, which has no part of the announced file yet, but the version
        with the hash `base`. Return where to enter the hashes of its chunks as they are verified, and deltas."""
        file = ServedFile(data, bytearray(-(-manifest.num_bytes // CHUNK_BYTES) * HASH_BYTES), base)
        if self._server is not None:  # else the deltas go with the download
            self._current = manifest.url.rpartition("/")[2], file
        return file

    @contextlib.contextmanager
    def _find(self, name: str) -> Iterator[ServedFile | None]:
        current = self._current
        yield current[1] if current is not None and current[0] == name else None


POLL_SECONDS = 0.25
"""Between two questions to a peer about what it has."""


@dataclass
class _Peer:
    offers: set[int] = field(default_factory=set)
    """Parts that it had when it was asked last."""
    due_at: float = 0.0
    """When to ask it again."""
    is_busy: bool = False


class Sources:
    def __init__(self, num_parts: int, peers: Sequence[str], rng: random.Random) -> None:
        self._rng = rng
        self._pending = dict.fromkeys(rng.sample(range(num_parts), num_parts))
        """In the order of requests; no values."""
        self._num_missing = num_parts
        self._peers = {peer: _Peer() for peer in peers}

    @property
    def is_complete(self) -> bool:
        return not self._num_missing

    def take(self) -> int | None:
        """Return a part to request from the publisher; None while all that are missing are in flight."""
        part = next(iter(self._pending), None)
        if part is not None:
            del self._pending[part]
        return part

    def take_from_peer(self) -> tuple[str, int] | None:
        """Return a peer, and a part that it has. None if no idle peer has a part that is needed."""
        for name, peer in self._idle():
            while peer.offers:
                part = peer.offers.pop()
                if part in self._pending:
                    del self._pending[part]
                    peer.is_busy = True
                    return name, part
        return None

    def take_poll(self, now: float) -> str | None:
        """Return a peer to ask what it has; None if there is nothing to ask now."""
        for name, peer in self._idle() if self._pending else ():
            if peer.due_at <= now:
                peer.is_busy, peer.due_at = True, now + POLL_SECONDS
                return name
        return None

    def record_offers(self, name: str, parts: Iterable[int]) -> None:
        if peer := self._peers.get(name):
            peer.is_busy, peer.offers = False, self._pending.keys() & parts

    def record_received(self, name: str | None = None) -> None:
        """A part was received and verified. `name`: the peer; None for the publisher."""
        self._num_missing -= 1
        if name is not None and (peer := self._peers.get(name)):
            peer.is_busy = False

    def record_peer_failed(self, name: str, part: int | None) -> None:
        """`part`: what was requested, to be requested from others; None if the peer was asked what it has."""
        self._peers.pop(name, None)
        if part is not None:
            self._pending[part] = None

    def _idle(self) -> list[tuple[str, _Peer]]:
        idle = [(name, peer) for name, peer in self._peers.items() if not peer.is_busy]
        self._rng.shuffle(idle)
        return idle


logger = logging.getLogger(__name__)

_CHUNKS_PER_PART = 16
_NUM_CONNECTIONS = 2
"""To the publisher, and as many to peers."""
_NUM_CHANGES_CONNECTIONS = 8
"""Instead, to the publisher for what changed: each is a thread there that looks for it, at about 1 GB/s."""
_CONNECT_SECONDS, _READ_SECONDS = 10, 60
_PEER_SECONDS = 3
"""To connect to a peer, and between its packets."""
_PEER_PART_SECONDS = 10
"""For a whole part. The publisher sends it to a receiver whose peer is slower."""
_REASON_BYTES = 500

Work = TypeVar("Work")


class Download:
    def __init__(
        self, manifest: WeightManifest, token: str, file: ServedFile, record_received: Callable[[int], None]
    ) -> None:
        """`file` gets the content, the hashes of verified chunks, and the deltas that came. `record_received` gets the
        number of bytes so far."""
        self._manifest, self._file, self._record_received = manifest, file, record_received
        self._verified = cast(bytearray, file.hashes)
        self.num_transferred = 0
        """Bytes that came for them."""
        self._headers = {"Authorization": f"Bearer {token}"}
        address = urlsplit(manifest.url)
        self._publisher, self._path = address.netloc, address.path
        num_chunks = -(-manifest.num_bytes // CHUNK_BYTES)
        self._sources = Sources(-(-num_chunks // _CHUNKS_PER_PART), manifest.peers, random.Random())
        self._hashes = b""
        self._num_received = 0
        self._touched: set[int] = set()
        """Parts that were requested: they may no longer have the version before."""
        self._changed = threading.Condition()
        """Protects all that follows, the sources and the number of received bytes."""
        self._error: BaseException | None = None
        self._connections: set[http.client.HTTPConnection] = set()

    def run(self) -> None:
        """Fill the file. Raise TransientError if the publisher does not have the announced file."""
        workers = [self._follow_publisher] * (_NUM_CHANGES_CONNECTIONS if self._file.base else _NUM_CONNECTIONS)
        workers += [self._follow_peers] * (_NUM_CONNECTIONS if self._manifest.peers else 0)
        self._attempt(self._fetch_hashes)
        if self._error is None:
            with ThreadPoolExecutor(len(workers), thread_name_prefix="download") as threads:
                for worker in workers:
                    threads.submit(self._attempt, worker)
        if self._error is not None:
            raise TransientError(f"{self._manifest.url}: {type(self._error).__name__}: {self._error}") from self._error

    def stop(self) -> None:
        """Make run() end soon, in another thread."""
        self._fail(ConnectionAbortedError("stopped"))

    def _attempt(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            for connection in self._connections:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):  # it is closed already
                        connection.sock.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def _fetch_hashes(self) -> None:
        with self._connect(self._publisher, _CONNECT_SECONDS, _READ_SECONDS) as connection:
            self._hashes = self._get_hashes(connection)
        if (found := hash_file(self._hashes)) != self._manifest.file_hash:
            raise TransientError(f"expected a file with hash {self._manifest.file_hash}, got {found}")

    def _follow_publisher(self) -> None:
        with self._connect(self._publisher, _CONNECT_SECONDS, _READ_SECONDS) as connection:
            while (part := self._wait_for(self._sources.take)) is not None:
                self._receive(connection, part)
                self._record(self._sources.record_received)

    def _follow_peers(self) -> None:
        with contextlib.ExitStack() as stack:
            connections: dict[str, http.client.HTTPConnection] = {}
            while (work := self._wait_for(self._take_from_peer)) is not None:
                name, part = work
                try:
                    if name not in connections:
                        connections[name] = stack.enter_context(self._connect(name, _PEER_SECONDS, _PEER_SECONDS))
                    if part is None:
                        self._record(self._sources.record_offers, name, self._find_offers(connections[name]))
                    else:
                        self._receive(connections[name], part, time.monotonic() + _PEER_PART_SECONDS)
                        self._record(self._sources.record_received, name)
                except (OSError, http.client.HTTPException, TransientError) as error:
                    logger.info("no more weights from peer %s: %s: %s", name, type(error).__name__, error)
                    self._record(self._sources.record_peer_failed, name, part)

    def _take_from_peer(self) -> tuple[str, int | None] | None:
        if (work := self._sources.take_from_peer()) is not None:
            return work
        name = self._sources.take_poll(time.monotonic())
        return None if name is None else (name, None)

    def _wait_for(self, take: Callable[[], Work | None]) -> Work | None:
        """Return what is to be done next; None if the download has ended."""
        with self._changed:
            while self._error is None and not self._sources.is_complete:
                if (work := take()) is not None:
                    return work
                self._changed.wait(POLL_SECONDS)
        return None

    def _record(self, record: Callable[..., None], *arguments: object) -> None:
        with self._changed:
            record(*arguments)
            self._changed.notify_all()

    @contextlib.contextmanager
    def _connect(
        self, address: str, connect_seconds: float, read_seconds: float
    ) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(address, timeout=connect_seconds)
        with self._changed:
            self._connections.add(connection)
        try:
            connection.connect()
            connection.sock.settimeout(read_seconds)
            if self._error is not None:
                raise ConnectionAbortedError("stopped")
            yield connection
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()

    def _find_offers(self, connection: http.client.HTTPConnection) -> list[int]:
        """Return the parts that a peer has."""
        found, size = self._get_hashes(connection), _CHUNKS_PER_PART * HASH_BYTES
        starts = range(0, len(self._hashes), size)
        return [i for i, at in enumerate(starts) if found[at : at + size] == self._hashes[at : at + size]]

    def _get_hashes(self, connection: http.client.HTTPConnection) -> bytes:
        num_bytes = -(-self._manifest.num_bytes // CHUNK_BYTES) * HASH_BYTES
        connection.request("GET", f"{self._path}/hashes", headers=self._headers)
        return _check(connection.getresponse(), http.HTTPStatus.OK, num_bytes).read()

    def _receive(self, connection: http.client.HTTPConnection, part: int, deadline: float | None = None) -> None:
        """Receive and verify a part. Raise TransientError after an unexpected response, and at a wrong chunk."""
        target = self._file.data
        first = part * _CHUNKS_PER_PART * CHUNK_BYTES
        end = min(first + _CHUNKS_PER_PART * CHUNK_BYTES, len(target))
        headers = self._headers | {"Range": f"bytes={first}-{end - 1}"}
        if self._file.base and part not in self._touched:
            headers[BASE_HEADER] = self._file.base
        self._touched.add(part)
        connection.request("GET", self._path, headers=headers)
        response = connection.getresponse()
        if is_delta := response.status == http.HTTPStatus.IM_USED:
            self.num_transferred += response.length or 0
        else:
            _check(response, http.HTTPStatus.PARTIAL_CONTENT, end - first)
            self.num_transferred += end - first
        for begin in range(first, end, CHUNK_BYTES):
            chunk = target[begin : min(begin + CHUNK_BYTES, end)]
            size = len(chunk)
            if is_delta:
                _read(response, memoryview(length := bytearray(LENGTH_BYTES)), deadline)
                size = int.from_bytes(length, "little")
            if size < len(chunk):
                _read(response, memoryview(delta := bytearray(size)), deadline)
                try:
                    deltas.apply(bytes(delta), chunk)
                except ValueError as error:
                    raise TransientError(str(error)) from error
                self._file.deltas[begin // CHUNK_BYTES] = bytes(delta)
            elif size == len(chunk):
                _read(response, chunk, deadline)
            else:
                raise TransientError(f"a chunk of {size} bytes")
            self._verify(chunk, begin // CHUNK_BYTES)
        response.close()  # the connection can be used again

    def _verify(self, chunk: memoryview, index: int) -> None:
        place = slice(index * HASH_BYTES, (index + 1) * HASH_BYTES)
        if (found := hash_chunk(chunk)) != self._hashes[place]:
            raise TransientError(f"chunk {index} has hash {found.hex()}, expected {self._hashes[place].hex()}")
        self._verified[place] = found
        with self._changed:
            self._num_received += len(chunk)
            self._record_received(self._num_received)


def _read(response: http.client.HTTPResponse, target: memoryview, deadline: float | None) -> None:
    """Fill `target` from the response."""
    received = 0
    while received < len(target):
        # Not readinto, which would wait for the whole chunk.
        num_bytes = response.fp.readinto1(target[received:])
        if not num_bytes:
            raise TransientError(f"the response ended after {received} of {len(target)} bytes")
        if deadline is not None and time.monotonic() > deadline:
            raise TransientError("too slow")
        received += num_bytes


def _check(response: http.client.HTTPResponse, status: int, num_bytes: int) -> http.client.HTTPResponse:
    if response.status != status:
        reason = response.read(_REASON_BYTES).decode(errors="replace")
        raise TransientError(f"HTTP {response.status}: {reason}")
    if response.length != num_bytes:
        raise TransientError(f"expected {num_bytes} bytes, got {response.length}")
    return response
