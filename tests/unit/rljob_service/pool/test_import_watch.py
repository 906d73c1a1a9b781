"""The line that an import executes, read from a stack of faulthandler."""

from __future__ import annotations

import asyncio
import faulthandler
import os

import pytest

from rljob_service.pool.import_watch import StackPipe, find_place

STACK = """Current thread 0x00007f24f1f6f080 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1116 in join
  File "/jobs/reward.py", line 12 in wait_for_model
  File "/jobs/reward.py", line 40 in <module>
  File "/opt/rljob_service/worker/load/loading.py", line 84 in _run
"""


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/jobs/reward.py", "/jobs/reward.py:12"),
        ("/other.py", "/usr/lib/python3.11/threading.py:1116 in join"),
    ],
)
def test_place_is_the_innermost_line_of_the_function(path: str, place: str) -> None:
    assert find_place(STACK, path) == place
    assert find_place("", path) == ""


def test_stack_of_a_process_is_located_and_a_closed_pipe_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def locate() -> tuple[str, str]:
        pipe = StackPipe()
        monkeypatch.setattr(os, "kill", lambda *_: faulthandler.dump_traceback(pipe.write_end, all_threads=False))
        try:
            found = await pipe.locate(os.getpid(), __file__)
        finally:
            pipe.close_write_end()
            pipe.close()
        return found, await pipe.locate(os.getpid(), __file__)

    found, closed = asyncio.run(locate())
    assert found.startswith(f"{__file__}:")
    assert closed == ""


def test_stack_that_arrives_in_pieces_is_read_whole_and_leftovers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def locate() -> str:
        loop, pipe = asyncio.get_running_loop(), StackPipe()
        pieces = STACK.splitlines(keepends=True)
        os.write(pipe.write_end, b'  File "/jobs/reward.py", line 99 in earlier\n')

        def answer(*_: int) -> None:
            for index, piece in enumerate(pieces):
                loop.call_later(0.01 * index, os.write, pipe.write_end, piece.encode())

        monkeypatch.setattr(os, "kill", answer)
        try:
            return await pipe.locate(os.getpid(), "/jobs/reward.py")
        finally:
            pipe.close_write_end()
            pipe.close()

    assert asyncio.run(locate()) == "/jobs/reward.py:12"
