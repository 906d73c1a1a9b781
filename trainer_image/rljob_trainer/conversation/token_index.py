"""Finds the recorded tokens with which a prompt of raw tokens begins, by digests: no list is compared twice."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rljob_trainer.conversation.turns import Turn, TurnTree


class _Digest:
    """Digest of the tokens of one sequence, which grows."""

    def __init__(self) -> None:
        self._hash, self._count = hashlib.blake2b(digest_size=16), 0

    def extend(self, token_ids: NDArray[np.int32], end: int) -> bytes:
        """Return the digest of the first `end` tokens. `end` never descends."""
        self._hash.update(token_ids[self._count : end].tobytes())
        self._count = end
        return self._hash.copy().digest()


class TokenIndex:
    def __init__(self, tree: TurnTree) -> None:
        self._tree = tree
        self._turns: dict[bytes, Turn] = {}
        """By the digest of all tokens up to the answer's last one."""
        self._segments: dict[int, _Digest] = {}
        self._ends: set[int] = set()
        self._num_turns = 0

    def find(self, token_ids: Sequence[int]) -> Turn | None:
        """Return the turn that ends the longest recorded sequence with which the tokens begin."""
        self._add_new_turns()
        digest, ids, found = _Digest(), np.asarray(token_ids, np.int32), None
        for end in sorted(end for end in self._ends if end <= len(ids)):
            found = self._turns.get(digest.extend(ids, end), found)
        return found

    def _add_new_turns(self) -> None:
        for turn in self._tree.turns[self._num_turns :]:
            digest = self._segments.setdefault(turn.segment, _Digest())
            self._turns[digest.extend(self._tree.segments[turn.segment].token_ids, turn.end)] = turn
            self._ends.add(turn.end)
        self._num_turns = len(self._tree.turns)
