"""What a process shows the server in memory that both map."""

from __future__ import annotations

import os

from rljob_service.worker.process import board


def test_both_sides_see_the_same_words() -> None:
    descriptor = board.create()
    server, worker = board.Board(descriptor), board.Board(descriptor)
    os.close(descriptor)
    worker.beat()
    worker.current = 1 << 31
    assert (server.beats, server.current) == (1, 1 << 31)
