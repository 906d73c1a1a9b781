"""The hand-over on the device: a rank gives the engines that wait for a version its tensors, by bucket.

    engine (`receive_tensors`)              rank (`HandOver`)
    token, key                    -->       (waits in a thread)
                                  <--       handle of the staging memory          `give`
    mapped                        -->
                                  <--       parts of a bucket      (repeated; two buckets take turns)
    copied                        -->
                                  <--       unmap
    unmapped                      -->       (frees the staging memory, and what the gathering left)
                                  <--       end

Invariant: `give` takes every tensor of the stream, which is a collective, whatever becomes of the receivers; and it
frees the staging memory. An engine unmaps it when its stream has ended, by its last tensor or by an error. A receiver
that ends, or does not answer in time, is dropped: its load fails, and no other.

`Channel` has the messages: JSON over a Unix socket, one with a file descriptor. The socket is in a folder of the Pod's
program that only its user can enter, and the receiver says the job's token first. Nothing is unpickled.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import logging
import mmap
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rljob_api.errors import TransientError
from rljob_trainer.weights.buckets import Assembly, Part, pack
from rljob_trainer.weights.cuda_ipc import CudaMemory, MappedCudaMemory

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


class HostMemory:
    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        """`descriptor`: of another process's memory, to map it. Without one, create it."""
        self.handle = b""
        self._file = os.memfd_create("rljob-weights") if descriptor is None else descriptor
        self.descriptor: int | None = self._file
        if descriptor is None:
            os.ftruncate(self._file, num_bytes)
        # Its pages live until the last view, here and there, is gone.
        self.tensor = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)

    def close(self) -> None:
        os.close(self._file)
        del self.tensor


class DeviceMemory(CudaMemory):
    descriptor: int | None = None


Staging = HostMemory | DeviceMemory
"""A rank's. `tensor`: [bytes] uint8; `handle`: with which a process of the same machine can map it; `descriptor`: a
file that the other process needs, too. Close it after every receiver has unmapped it, or is lost."""
MappedStaging = HostMemory | MappedCudaMemory
"""A receiver's."""


def create_staging(num_bytes: int, device: torch.device) -> Staging:
    return HostMemory(num_bytes) if device.type == "cpu" else DeviceMemory(num_bytes, device)


def map_staging(handle: bytes, descriptor: int | None, num_bytes: int, device: torch.device) -> MappedStaging:
    if device.type != "cpu":
        return MappedCudaMemory(handle, num_bytes, device)
    assert descriptor is not None
    return HostMemory(num_bytes, descriptor)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it in this thread."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def socket_path(folder: Path, device: torch.device) -> Path:
    """Return where the rank of this device listens: a GPU has the same UUID for all processes of the machine."""
    name = "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
    return folder / f"{name}.sock"


log = logging.getLogger(__name__)

BUCKET_BYTES = 64 << 20
"""Two of them are on the device during a hand-over."""
_NUM_BUCKETS = 2
_HELLO_SECONDS = 5.0
ANSWER_SECONDS = 60.0
"""The longest time for an engine to copy a bucket: it first loads the layers that are complete."""


class HandOver:
    """Listens from construction to `close`, in a thread of its own. The other methods are for one thread."""

    def __init__(
        self,
        folder: Path,
        token: str,
        device: torch.device,
        bucket_bytes: int = BUCKET_BYTES,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """`folder`: of the Pod's program. `answer_seconds`: after which an engine that copies a bucket is dropped.
        Raise OSError if the folder does not exist."""
        self._token, self._device, self._bucket_bytes = token, device, bucket_bytes
        self.answer_seconds = answer_seconds
        self._path = socket_path(folder, device)
        self._path.unlink(missing_ok=True)  # of a rank that was killed
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._lock = threading.Condition()
        """Guards what follows, and is notified when an engine begins to wait."""
        self._key = ""
        """Key of the version that engines may ask for; empty while they may not."""
        self._waiting: list[Channel] = []
        threading.Thread(target=self._accept, name="hand-over", daemon=True).start()

    def close(self) -> None:
        self.allow("")
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def allow(self, key: str) -> None:
        """Let engines ask for this version; with an empty key for none. Refuse those that wait."""
        with self._lock:
            self._key, refused, self._waiting = key, self._waiting, []
        for channel in refused:
            channel.close()

    @property
    def num_waiting(self) -> int:
        with self._lock:
            for channel in [each for each in self._waiting if each.is_closed()]:
                self._waiting.remove(channel)
                channel.close()
            return len(self._waiting)

    def give(self, tensors: Iterable[tuple[str, Tensor]], wait_seconds: float, release: Callable[[], None]) -> int:
        """Give all engines that wait the tensors, and return how many have got them. Without any, wait for one up to
        `wait_seconds`. `release`: frees what the tensors leave in the allocator."""
        with self._lock:
            self._lock.wait_for(lambda: self.num_waiting > 0, wait_seconds)
            channels, self._waiting = self._waiting, []
        if not channels:
            for _ in tensors:
                pass
            release()
            return 0
        receivers = [_Receiver(channel, self.answer_seconds) for channel in channels]
        try:
            self._give(receivers, tensors)
            release()
            for receiver in receivers:
                receiver.send({"end": True})
            return sum(not receiver.is_lost for receiver in receivers)
        finally:
            for channel in channels:
                channel.close()

    def _give(self, receivers: list[_Receiver], tensors: Iterable[tuple[str, Tensor]]) -> None:
        staging = create_staging(_NUM_BUCKETS * self._bucket_bytes, self._device)
        try:
            self._send_buckets(receivers, staging, tensors)
            for receiver in receivers:
                receiver.send({"unmap": True})
            _wait(receivers)
        finally:
            staging.close()

    def _send_buckets(
        self, receivers: list[_Receiver], staging: Staging, tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        handle = base64.b64encode(staging.handle).decode()
        for receiver in receivers:
            receiver.send({"handle": handle, "num_bytes": len(staging.tensor)}, staging.descriptor)
        _wait(receivers)
        for number, parts in pack(tensors, staging.tensor.split(self._bucket_bytes)):
            synchronize(self._device)
            _wait(receivers)  # for the bucket before: `pack` writes to it next
            for receiver in receivers:
                receiver.send({"start": number * self._bucket_bytes, "parts": parts})
        _wait(receivers)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            channel = Channel(connection)
            try:
                self._admit(channel)
            except ClosedError as error:
                log.warning("an engine's request for weights: %s", error)
                channel.close()

    def _admit(self, channel: Channel) -> None:
        hello = channel.receive(_HELLO_SECONDS)
        if not hmac.compare_digest(str(hello.get("token")).encode(), self._token.encode()):
            raise ClosedError("a wrong token")
        with self._lock:
            if self._key and hello.get("key") == self._key:
                self._waiting.append(channel)
                self._lock.notify_all()
                return
            reason = f"it offers {self._key}" if self._key else "it is the trainer's turn"
        channel.send({"refused": reason})
        channel.close()


@dataclass
class _Receiver:
    """An engine's worker during a hand-over."""

    channel: Channel
    answer_seconds: float
    is_lost: bool = False
    _owes: bool = False

    def send(self, message: dict[str, str | int | bool | list[Part]], descriptor: int | None = None) -> None:
        if not self.is_lost:
            with self._losing():
                self.channel.send(message, descriptor)
                self._owes = True

    def wait(self) -> None:
        """Wait for the answer to the last message."""
        if self._owes and not self.is_lost:
            with self._losing():
                self.channel.receive(self.answer_seconds)
                self._owes = False

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except ClosedError as error:
            self.is_lost = True
            self.channel.close()  # its load fails
            log.warning("an engine was lost in the hand-over of weights: %s", error)


def _wait(receivers: Iterable[_Receiver]) -> None:
    for receiver in receivers:
        receiver.wait()


_CONNECT_SECONDS = 5.0
_WAIT_SECONDS = 100.0
"""For the rank to begin, and to gather the next bucket. Less than a rollout has to fall asleep: then the load ends."""


def receive_tensors(folder: Path, token: str, key: str, device: torch.device) -> Generator[tuple[str, Tensor]]:
    """Yield the tensors of version `key`, in memory of their own on `device`. Raise TransientError if the rank ends,
    or offers another version."""
    try:
        with contextlib.closing(Channel.connect(socket_path(folder, device), _CONNECT_SECONDS)) as channel:
            channel.send({"token": token, "key": key})
            yield from _receive(channel, device)
    except ClosedError as error:
        raise TransientError(f"the trainer's rank hands over no weights {key}: {error}") from error


def _receive(channel: Channel, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    first = channel.receive(_WAIT_SECONDS)
    if "refused" in first:
        raise ClosedError(first["refused"])
    descriptor, channel.descriptor = channel.descriptor, None
    staging = map_staging(base64.b64decode(first["handle"]), descriptor, first["num_bytes"], device)
    assembly = Assembly(device)
    try:
        channel.send({})
        while "parts" in (message := channel.receive(_WAIT_SECONDS)):
            bucket = staging.tensor[message["start"] :]
            done = [assembly.add(Part(*part), bucket) for part in message["parts"]]
            synchronize(device)
            del bucket
            channel.send({})  # before the load of what is complete: the rank gathers meanwhile
            yield from (tensor for tensor in done if tensor is not None)
    finally:
        staging.close()
    if not assembly.is_complete:
        raise ClosedError("a tensor is not complete")
    channel.send({})
    if "end" not in channel.receive(_WAIT_SECONDS):
        raise ClosedError("it sends more than all tensors")
