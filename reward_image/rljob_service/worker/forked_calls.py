"""isolation: request. Each request runs in a separate process, forked from the worker that has loaded the function.

Owns that process, from the fork to its answer and its exit. What a request changes in memory ends with it. Invariants:
the worker has one thread when it forks; user code does not run in the worker after the import; the process can neither
trace, signal nor adjust the worker, nor read its requests.
"""

import gc
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from rljob_api.errors import UserError
from rljob_service.worker.code.code_output import describe_end
from rljob_service.worker.process.frames import MAX_FRAME_BYTES
from rljob_service.worker.sandbox import prepare_calls
from rljob_service.worker.sandbox.system import die_with

_CHUNK_BYTES = 1 << 18
_FAILED = 1


class CallDiedError(Exception):
    """The process ended without an answer. The message says how."""


class ForkedCalls:
    """`run`: executes a request and returns its answer. `inherited`: descriptors that a request must not have."""

    def __init__(self, run: Callable[[bytes], bytes], inherited: list[int]) -> None:
        if threads := find_threads():
            raise UserError(
                f"the import of the function left threads that run: {', '.join(threads)}. isolation: request forks the "
                "loaded process, which is safe with one thread alone; start them in a call, or remove isolation"
            )
        self._run = run
        self._inherited = inherited
        self._confine = prepare_calls()
        gc.collect()
        gc.freeze()  # the collector of a process would copy what it shares with the worker

    def execute(self, body: bytes) -> bytes:
        """Return the answer. Raise CallDiedError if the process ends without one."""
        sys.stdout.flush()
        sys.stderr.flush()
        read_end, write_end = os.pipe()
        worker_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._execute_in_child(body, worker_pid, write_end)
        os.close(write_end)
        ended = os.pidfd_open(pid)
        try:
            answer = _read_until(ended, read_end)
        finally:
            os.close(read_end)
            os.close(ended)
            _, status = os.waitpid(pid, 0)
        if code := os.waitstatus_to_exitcode(status):
            log = "" if code > 0 else "; its log has what it printed"
            raise CallDiedError(f"the process of the call {describe_end(code)}{log}")
        if not answer:
            raise CallDiedError("the process of the call ended without an answer")
        return answer

    def _execute_in_child(self, body: bytes, worker_pid: int, answer: int) -> NoReturn:
        code = _FAILED
        try:
            os.setsid()  # a signal to its own group must not reach the worker
            die_with(worker_pid)
            for descriptor in self._inherited:
                os.close(descriptor)
            self._confine()
            own_pid = os.getpid()
            payload = memoryview(self._run(body))
            if os.getpid() != own_pid:
                os._exit(0)  # a child that user code forked and let return
            while payload:
                payload = payload[os.write(answer, payload) :]
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)


def _read_until(ended: int, source: int) -> bytes:
    """Return what is written until the process has ended. Others that it started may still hold the other end."""
    os.set_blocking(source, False)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(source, select.POLLIN)
    pieces, size, has_ended = [], 0, False
    while not has_ended:
        # In this order: what was written before the end is read after it.
        has_ended = any(descriptor == ended for descriptor, _ in poll.poll())
        while piece := _read(source):
            size += len(piece)
            if size <= MAX_FRAME_BYTES:
                pieces.append(piece)
            elif has_ended:
                break
        if piece == b"" and not has_ended:
            poll.unregister(source)
            poll.poll()
            has_ended = True
    return b"".join(pieces)


def _read(source: int) -> bytes | None:
    """Return the next bytes; b"" at the end, None if there are none now."""
    try:
        return os.read(source, _CHUNK_BYTES)
    except BlockingIOError:
        return None


def find_threads() -> list[str]:
    """Return the names of the threads besides the main one, of Python and of libraries."""
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = [int(name) for name in os.listdir("/proc/self/task") if int(name) != os.getpid()]
    return [named.get(thread) or _name_of(thread) for thread in found]


def _name_of(thread: int) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm") as file:
            return file.read().strip()
    except OSError:
        return str(thread)
