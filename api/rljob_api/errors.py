"""The exception tree.

RLJobError
├── UserError        the job, its data or its reward is wrong; the message names place and remedy   (exit 78)
└── TransientError   something around the job failed; trying again may help                        (exit 75)
"""


class RLJobError(Exception):
    """Base of every error that RLJob raises on purpose."""


class UserError(RLJobError, ValueError):
    """Permanent: only the user can mend it. The message says what is wrong, where, and what would be right."""


class TransientError(RLJobError):
    """A process, node or network failed."""
