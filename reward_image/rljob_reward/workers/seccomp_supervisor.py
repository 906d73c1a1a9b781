"""The server's answers to what a worker's seccomp filter asks: may this process start another, may it touch that one.

Owns one listener. A process that is asked for counts against the worker's limit until a look at /proc says that it has
ended; past the limit the worker is ended as a whole, which is a verdict with a reason where a refused fork() is a
riddle. Closing the gate makes every further call of the kind fail, so what a dead worker left cannot multiply.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Callable

from rljob_reward.worker.sandbox import seccomp
from rljob_reward.worker.sandbox.calls import numbers
from rljob_reward.workers import process_marks as marks

_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_QUESTION = struct.Struct("=QIIiIQ6Q")  # id, pid, flags, nr, arch, ip, arguments
_ANSWER = struct.Struct("=QqiI")  # id, value, error, flags
_CONTINUE = 1

_NAMES = {number: name for name, number in numbers().items()}


class Gate:
    """Answers for one worker and everything that it starts."""

    def __init__(self, listener: int, mark: int, max_processes: int, on_excess: Callable[[], None]) -> None:
        self._listener = listener
        self._mark = mark
        self._max_processes = max_processes
        self._on_excess = on_excess
        self._upper_bound = 0
        """Processes and threads that there can be at most, the worker's main thread left out."""
        self.has_spawned = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener, self._answer)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        os.close(self._listener)

    def _answer(self) -> None:
        question = bytearray(_QUESTION.size)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, question)
        except OSError:
            return  # who asked was killed meanwhile
        number, _, _, call, _, _, *arguments = _QUESTION.unpack(question)
        error = self._judge(_NAMES.get(call, ""), arguments)
        answer = _ANSWER.pack(number, 0, -error, 0 if error else _CONTINUE)
        with contextlib.suppress(OSError):  # a signal took the question back; it is asked again if need be
            fcntl.ioctl(self._listener, _SEND, bytearray(answer))

    def _judge(self, call: str, arguments: list[int]) -> int:
        """0: go on. Else the errno that the call fails with."""
        if call in seccomp.SPAWNING:
            return self._judge_spawn()
        target = struct.unpack("=i", struct.pack("=I", arguments[seccomp.PID_ARGUMENT[call]] & 0xFFFFFFFF))[0]
        return 0 if self._is_own(target) else errno.EPERM

    def _judge_spawn(self) -> int:
        self.has_spawned = True
        self._upper_bound += 1
        if self._upper_bound <= self._max_processes:
            return 0
        self._upper_bound = marks.count(self._mark)  # with the main thread in place of the one that is to come
        if self._upper_bound <= self._max_processes:
            return 0
        self._on_excess()
        return errno.EAGAIN

    def _is_own(self, target: int) -> bool:
        if target > 0:
            return marks.mark_of(target) == self._mark
        # A group cannot span sessions, and every worker begins one: one member tells for all.
        return any(marks.group_of(pid) == -target for pid in marks.find(self._mark))
