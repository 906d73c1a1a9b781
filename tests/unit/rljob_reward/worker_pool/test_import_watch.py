"""The line that an import executes, read from a stack of faulthandler."""

from __future__ import annotations

import asyncio
import faulthandler
import os

import pytest

from rljob_reward.worker_pool.import_watch import StackPipe, find_place

STACK = """Current thread 0x00007f24f1f6f080 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1116 in join
  File "/jobs/reward.py", line 12 in wait_for_model
  File "/jobs/reward.py", line 40 in <module>
  File "/opt/rljob_reward/worker/loading.py", line 84 in _run
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
