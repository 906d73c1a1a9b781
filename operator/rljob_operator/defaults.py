"""What an installation of the operator decides for every job that does not decide it for itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defaults:
    """Values of the chart that reach the children."""

    trainer_image: str = "rljob/trainer:0.1.0"
    """Head, trainers and rollouts."""
    reward_image: str = "rljob/reward:0.1.0"


DEFAULTS = Defaults()
