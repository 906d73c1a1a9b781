"""Whether an error while a model or an engine starts comes from the configuration, and its message in one line.

Libraries raise dozens of types, some of them in a child process, so this reads class names and texts, not types.
Pure. Invariant: unknown errors, and those of networks and devices, are infrastructure errors, so a restart is tried.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from rljob_api.errors import TransientError, UserError
from rljob_api.wire.contract import ExitCode

_MAX_MESSAGE_LENGTH = 600
_USER_TYPES = {
    *("ValueError", "TypeError", "KeyError", "AttributeError", "AssertionError", "NotImplementedError", "ImportError"),
    *("FileNotFoundError", "NotADirectoryError", "IsADirectoryError", "PermissionError"),
    *("SafetensorError", "OutOfMemoryError"),
    *("GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError", "RemoteEntryNotFoundError"),
}
"""Raised for the same input in every attempt. Subclasses count, too."""
_INFRASTRUCTURE_TYPES = {
    # Some of them are subclasses of ValueError or FileNotFoundError: the network failed, not the configuration.
    *("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "TimeoutError", "Timeout"),
    *("DistBackendError", "DistNetworkError", "DistStoreError", "AcceleratorError"),
    "TransportError",  # httpx's, of the Hub's client
}
_USER_TEXTS = re.compile(
    r"is not a local folder and is not a valid model identifier|does not appear to have a file named"
    r"|gated repo|size mismatch for|Error\(s\) in loading state_dict|out of memory|no file named .*safetensors"
    r"|Cannot find any model weights|Repo id must be in the form|size of tensor a .* must match"
    # A dtype that this CPU or its kernels lack.
    r"|not implemented for '\w+'|could not create a primitive",
    re.IGNORECASE,
)
"""Texts of types that say nothing: OSError, RuntimeError."""
_INFRASTRUCTURE_TEXTS = re.compile(
    # A process that has just ended still holds memory of the GPU.
    r"Free memory on device .* is less than desired|couldn't connect to|Connection (refused|reset|aborted)"
    r"|No space left on device|CUDA error|NCCL error|\b50[0234] Server Error",
    re.IGNORECASE,
)
_PLAIN_TYPES = {"ValueError", "OSError", "RuntimeError", "UserError", "TransientError", "GpuFaultError"}
"""Their messages need no type in front."""
_PYDANTIC_HEADER = re.compile(r"\d+ validation errors? for \w+")
_PYDANTIC_SUFFIX = re.compile(r" \[type=\w+, input_value=.*$", re.DOTALL)


class SourceAwayError(TransientError):
    """The network or the Hub fails, so that a model or data cannot be read now."""


class ErrorFacts(NamedTuple):
    """An error, without its object: it may come from another process."""

    types: tuple[str, ...]
    """Names of its class and of all bases, the class first."""
    message: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorFacts:
        """Read an error; for a group of tasks that failed, the first one."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return cls(tuple(base.__name__ for base in type(error).__mro__), str(error))

    @classmethod
    def from_json(cls, text: str) -> ErrorFacts:
        types, message = json.loads(text)
        return cls(tuple(types), message)

    def to_json(self) -> str:
        return json.dumps(self)


def explain_end(error: Exception) -> tuple[str, ExitCode]:
    """Return the termination message and the exit code of a program that an error ends. An unexpected error is retried
    within the role's backoff limit."""
    if isinstance(error, UserError):
        return str(error), ExitCode.USER
    message = str(error) if isinstance(error, TransientError) else summarize(ErrorFacts.of(error))
    return message, ExitCode.INFRASTRUCTURE


def is_infrastructure_error(error: ErrorFacts) -> bool:
    """Whether it is known to come from a network, a device or a disk."""
    return bool(set(error.types) & _INFRASTRUCTURE_TYPES) or _INFRASTRUCTURE_TEXTS.search(error.message) is not None


def is_configuration_error(error: ErrorFacts) -> bool:
    if is_infrastructure_error(error):
        return False
    return bool(set(error.types) & _USER_TYPES) or _USER_TEXTS.search(error.message) is not None


def summarize(error: ErrorFacts) -> str:
    """Return the type and the line that says what is wrong: not the header and the links of a validation error."""
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    if lines and _PYDANTIC_HEADER.fullmatch(lines[0]) and len(lines) > 1:
        # Either the message itself, or a field and below it the message.
        line = next((line for line in lines[1:] if "[type=" in line), lines[1])
        return _PYDANTIC_SUFFIX.sub("", line).removeprefix("Value error, ")[:_MAX_MESSAGE_LENGTH]
    first = next(iter(lines), "")
    is_plain = error.types[0] in _PLAIN_TYPES
    return (first if is_plain and first else ": ".join(filter(None, [error.types[0], first])))[:_MAX_MESSAGE_LENGTH]
