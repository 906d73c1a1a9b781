"""Defaults that an installation of the operator sets for all jobs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Defaults:
    """Chart values that the children use."""

    trainer_image: str = "rljob/trainer:0.1.0"
    """Of head, trainers and rollouts."""
    reward_image: str = "rljob/reward:0.1.0"


DEFAULTS = Defaults()
