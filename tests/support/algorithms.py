"""Specs and rewards for tests of algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rljob_api.manifest.job import RLJobSpec
from rljob_trainer.algorithms.base import EpisodeRewards


def algorithm_spec(*, weights: Sequence[float] = (1.0,), max_tokens: int = 10, **algorithm: Any) -> RLJobSpec:
    """Return a spec with these settings of its algorithm, in camelCase. `weights`: of its rewards."""
    return RLJobSpec.model_validate(
        {
            "model": {"source": "m"},
            "data": {"train": {"source": "d"}},
            "rewards": [{"name": f"r{i}", "weight": w, "function": {"file": "x"}} for i, w in enumerate(weights)],
            "algorithm": algorithm,
            "rollout": {"sampling": {"maxTokens": max_tokens}},
        }
    )


def rewards_of(score: float, num_sampled: int = 1, **fields: Any) -> EpisodeRewards:
    """Return the rewards of an episode with one turn."""
    return EpisodeRewards(score, **{"turn_rewards": [0.0], "turn_of_token": np.zeros(num_sampled, np.int32)} | fields)
