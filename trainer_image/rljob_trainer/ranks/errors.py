"""Errors of the trainer group. This module imports no Ray, so the driver can catch them."""

from __future__ import annotations

from rljob_api.errors import TransientError


class RankLostError(TransientError):
    """A collective failed because another rank no longer exists."""


class TrainerGroupDiedError(TransientError):
    """A rank or its node died, and the group killed its other ranks. Start a new group from the last checkpoint."""
