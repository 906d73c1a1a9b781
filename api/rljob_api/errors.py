"""The exception tree.

RLJobError
├── UserError        the job, its data or its reward is wrong   (exit code 78)
└── TransientError   the infrastructure failed; a retry may help (exit code 75)
"""


class RLJobError(Exception):
    """Base of all errors that RLJob raises."""


class UserError(RLJobError, ValueError):
    """A permanent error that only the user can fix. The message states what is wrong, where, and how to fix it."""


class TransientError(RLJobError):
    """A process, node or network failed."""
