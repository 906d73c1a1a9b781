"""Which prompts are drawn less often: those whose groups always, or never, succeed. Pure.

A group in which each sample succeeds, or none, has no advantage under group baselines, and is a waste of rollouts. Such
prompts tend to stay so for some epochs, which GRESO found (Zheng et al., arXiv:2506.02177): it skips a prompt before
its rollout with the probability 1 - p^z after z groups in sequence without a signal. Here p is 1/2, and epochs are
counted in place of a draw: a prompt with a streak of z is due in one of every 2^z epochs, up to a limit. Which one
depends on the seed and its row, so that prompts of one streak spread over the epochs. Intervals are powers of two, so
that a row is due in each epoch in which it is with a longer one: a result that comes late cannot let it miss its turn.

Invariants: whether a row is due is a pure function of the seed, the epoch and its streak; each row is due at least once
in any `limit` epochs, so no prompt is lost; a group of mixed results makes a prompt due in each epoch again.
"""

import base64
import zlib

import numpy as np
from numpy.typing import NDArray

from rljob_api.manifest.job_sections import Curriculum
from rljob_trainer.episodes.types import Group

MAX_STREAK = 10
"""Longer ones are not counted: 2^10 is the highest limit of epochs."""


def judge_group(group: Group, success: float) -> int | None:
    """Return 1 if each valid sample succeeded, -1 if none did, and 0 if some did; None if no sample is valid.

    A sample succeeds if its reward, as training raises it, is at least `success`."""
    rewards = [reward for episode in group.episodes if (reward := episode.total_reward) is not None]
    num_succeeded = sum(reward >= success for reward in rewards)
    if not rewards:
        return None
    return 1 if num_succeeded == len(rewards) else -1 if not num_succeeded else 0


class SuccessHistory:
    """The streaks of the prompts of one source: 1 byte a row."""

    def __init__(self, num_rows: int, settings: Curriculum, packed: str = "", *, seed: int, source: int = 0) -> None:
        """`packed`: of `pack`. `source`: number of the source in the job."""
        self._settings = settings
        self._streaks: NDArray[np.int8] = unpack(packed, num_rows)
        """[rows] Groups in sequence that succeeded (above 0) or failed (below 0) as a whole."""
        draws = np.random.Generator(np.random.PCG64([seed, source, 0, 1]))  # not an order of rows
        self._phases = draws.integers(0, 2**31, num_rows)
        """[rows] Which of the epochs a row is due in."""

    def record(self, row: int, result: int) -> None:
        """Count a group of the row: 1 succeeded, -1 failed, 0 mixed (`judge_group`)."""
        streak = int(self._streaks[row])
        continued = streak + result if streak * result >= 0 else result
        self._streaks[row] = max(-MAX_STREAK, min(MAX_STREAK, continued)) if result else 0

    def interval(self, row: int) -> int:
        """Return in one of how many epochs the row is due."""
        streak = int(self._streaks[row])
        limit = self._settings.easy_epochs if streak > 0 else self._settings.hard_epochs
        return 1 << min(abs(streak), limit.bit_length() - 1)

    def is_due(self, row: int, epoch: int) -> bool:
        return (epoch + int(self._phases[row])) % self.interval(row) == 0

    def pack(self) -> str:
        """Return the streaks as text; empty if there are none."""
        return base64.b64encode(zlib.compress(self._streaks.tobytes(), 1)).decode() if self._streaks.any() else ""


def unpack(packed: str, num_rows: int) -> NDArray[np.int8]:
    """Return the streaks of `num_rows` rows. Rows that the data did not have before have none."""
    streaks = np.zeros(num_rows, np.int8)
    if packed:
        found = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.int8)[:num_rows]
        streaks[: len(found)] = found
    return streaks
