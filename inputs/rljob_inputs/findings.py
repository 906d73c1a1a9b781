"""What the checks of a job's inputs return: findings at fields of the manifest, and a table of prompt lengths.

Invariant: plain data without any heavy import, so that the CLI can show it quickly.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or for a warning, may go wrong."""

    path: str
    """Field of the manifest, such as spec.data.train.prompt."""
    message: str
    """What is wrong, where in the files, and the fix."""
    is_warning: bool = False
    is_transient: bool = False
    """Nothing is known to be wrong: the Hub cannot be reached from here."""
    is_refused: bool = False
    """The Hub does not have it, or not for this machine's token."""


@dataclass(frozen=True)
class LengthTable:
    """Lengths of the prompts of one dataset, in tokens."""

    path: str
    """spec.data.train or spec.data.eval."""
    num_rows: int
    """Rows of the dataset; of a streamed dataset, the rows that were read."""
    num_measured: int
    """Rows that were tokenized: all, or an even sample."""
    min: int
    median: int
    p95: int
    max: int
    limit: int | None
    """Longest prompt that the job uses. None: no limit is known."""
    limit_reason: str
    """Where the limit comes from, such as `rollout.maxModelLen 512 - rollout.sampling.maxTokens 32`."""
    num_too_long: int
    """Measured prompts above the limit. The job leaves them out."""
