"""An accelerator without a device, for fake tensors: torch sees what a GPU has, and what is in host memory.

torch's CUDA needs a driver for a backward pass, even of fake tensors. PrivateUse1 does not: its streams and events are
Python. Process-wide: torch.accelerator becomes this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "fakegpu"


class _Event:
    """Has happened: nothing runs in parallel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> _Event:
        return self

    def synchronize(self) -> None: ...


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def wait_stream(self, stream: _Stream) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return _Event()


class _Module(_DummyBackendModule):
    """What FSDP2 and the policy call of torch.cuda."""

    Stream, Event = _Stream, _Event

    def current_stream(self, *args: Any) -> _Stream:
        return _Stream()

    def synchronize(self, *args: Any) -> None: ...

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        yield


def register() -> torch.device:
    """Return the device. Once per process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    return torch.device(NAME, 0)
