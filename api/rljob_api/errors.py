"""The exception tree.

RLJobError
├── UserError        the job, its data or its reward is wrong   (exit code 78)
└── TransientError   the infrastructure failed; a retry may help (exit code 75)
"""

import copyreg
from typing import Any


class RLJobError(Exception):
    """Base of all errors that RLJob raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it without its constructor, whose parameters subclasses choose."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class UserError(RLJobError, ValueError):
    """A permanent error that only the user can fix. The message states what is wrong, where, and how to fix it."""


class TransientError(RLJobError):
    """A process, node or network failed."""
