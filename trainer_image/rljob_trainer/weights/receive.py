"""An engine's side of the hand-over on the device (see weights.hand_over): the tensors of a version, from the rank on
its GPU.

Invariant: the rank's memory is unmapped when the stream has ended, whether by its last tensor or by an error.
"""

import base64
import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path

import torch
from torch import Tensor

from rljob_api.errors import TransientError
from rljob_trainer.weights.buckets import Assembly, Part
from rljob_trainer.weights.channel import Channel, ClosedError
from rljob_trainer.weights.staging import map_staging, socket_path, synchronize

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
