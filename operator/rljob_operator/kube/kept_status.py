"""Drivers' statuses between two polls, as JSON of what is not a default. Pure.

The operator keeps three of each job: the last one, the one that the plan saw, and the one that an idle job had. As
objects, most of whose fields hold defaults, they took a quarter of its memory. Invariant: what is kept equal, is equal.
"""

from typing import Any

from rljob_api.wire.driver_status import DriverStatus

_PASSING: dict[str, Any] = {
    "demand": True,
    "since_step_seconds": True,
    "training_share": True,
    "lost_seconds": True,
    "hung": {"__all__": {"seconds"}},
    "outages": {"__all__": {"seconds", "message"}},
}
"""Times that pass, whose effects a plan's `valid_until` knows, and the demand, by which no reward of an idle job is
autoscaled."""


def keep_status(status: DriverStatus) -> bytes:
    return status.model_dump_json(exclude_defaults=True).encode()


def keep_lasting(status: DriverStatus) -> bytes:
    """Keep what ends the idle state of a job when it changes: for comparisons alone."""
    return status.model_dump_json(exclude_defaults=True, exclude=_PASSING).encode()


def read_status(kept: bytes) -> DriverStatus:
    return DriverStatus.model_validate_json(kept)
