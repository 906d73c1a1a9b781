"""Where the import of a worker is: asks for its stack, and names the innermost line of the function's file.

The worker writes its stack to a pipe when it gets SIGUSR1, until the function has loaded (worker/main.py). Owns the
server's end of that pipe.
"""

import asyncio
import contextlib
import os
import re
import signal

_ANSWER_SECONDS = 1.0
"""A process that does not run, such as one in an uninterruptible wait, does not answer."""
_QUIET_SECONDS = 0.2
"""faulthandler writes a stack in many small pieces, and nothing marks the last one."""
_MAX_STACK_BYTES = 64 << 10
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class StackPipe:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)

    def close_write_end(self) -> None:
        """Close the end that the worker has inherited."""
        os.close(self.write_end)

    def close(self) -> None:
        if self._read_end >= 0:
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1

    async def locate(self, pid: int, path: str) -> str:
        """Return what the process executes, as FILE:LINE; empty if it does not answer. It must not be reaped yet."""
        if self._read_end < 0:
            return ""
        arrived = asyncio.Event()
        self._loop.add_reader(self._read_end, arrived.set)
        try:
            self._read_available()  # what an earlier answer left
            arrived.clear()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR1)
            stack, patience = b"", _ANSWER_SECONDS
            while len(stack) < _MAX_STACK_BYTES and await _is_set_within(arrived, patience):
                arrived.clear()
                if (piece := self._read_available()) == b"":
                    break  # the worker has ended
                stack, patience = stack + (piece or b""), _QUIET_SECONDS
            return find_place(stack.decode(errors="replace"), path)
        except OSError:
            return ""
        finally:
            if self._read_end >= 0:
                self._loop.remove_reader(self._read_end)

    def _read_available(self) -> bytes | None:
        try:
            return os.read(self._read_end, _MAX_STACK_BYTES)
        except BlockingIOError:
            return None


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def find_place(stack: str, path: str) -> str:
    """Return the innermost line of `path` in a stack of faulthandler, else the innermost line."""
    frames = _FRAME.findall(stack)
    own = [f"{file}:{line}" for file, line, _ in frames if file == path]
    others = [f"{file}:{line} in {function}" for file, line, function in frames]
    return next(iter(own or others), "")
