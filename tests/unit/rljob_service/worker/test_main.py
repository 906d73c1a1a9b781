"""What a request leaves in its process: timers are reset, threads and exhausted resources are reasons."""

from __future__ import annotations

import concurrent.futures
import errno
import resource
import signal
import threading
from collections.abc import Iterator

import pytest

from rljob_service.worker.main import Leftovers, _count_computed, describe_exhaustion


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Ends the threads of a test."""
    event = threading.Event()
    yield event
    event.set()


def test_pending_alarm_and_timer_are_cancelled() -> None:
    leftovers = Leftovers()
    fired = threading.Event()
    threading.Timer(3600, fired.set).start()
    signal.setitimer(signal.ITIMER_REAL, 3600)
    signal.setitimer(signal.ITIMER_PROF, 3600)
    assert leftovers.reset() == ""
    assert signal.getitimer(signal.ITIMER_REAL) == signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)] == []


def test_handler_that_raises_while_timers_are_reset_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = iter([TimeoutError("of the function")])

    def setitimer(timer: int, seconds: float) -> None:
        for error in raised:
            raise error

    monkeypatch.setattr(signal, "setitimer", setitimer)
    assert Leftovers().reset() == ""


def test_thread_that_would_keep_a_program_from_ending_is_a_reason(release: threading.Event) -> None:
    leftovers = Leftovers()
    threading.Thread(target=release.wait, name="grader").start()
    assert leftovers.reset() == "a request left threads that still run: grader"


def test_threads_of_the_import_of_executors_and_daemons_may_stay(release: threading.Event) -> None:
    threading.Thread(target=release.wait).start()
    leftovers = Leftovers()
    threading.Thread(target=release.wait, daemon=True).start()
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        assert leftovers.reset() == ""


def test_thread_that_is_about_to_end_is_waited_for() -> None:
    leftovers = Leftovers()
    thread = threading.Thread(target=int)
    thread.start()
    assert leftovers.reset() == ""
    assert not thread.is_alive()


def _wrap(error: Exception) -> Exception:
    wrapper = RuntimeError("wrapped by a library")
    wrapper.__cause__ = error
    return wrapper


@pytest.mark.parametrize(
    ("error", "resource"),
    [
        (MemoryError(), "memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (OSError(errno.EMFILE, "Too many open files"), "open files"),
        (_wrap(OSError(errno.ENFILE, "Too many open files in system")), "open files"),
    ],
)
def test_error_of_an_exhausted_process_names_the_resource(error: Exception, resource: str) -> None:
    assert describe_exhaustion(error) == f"it ran out of {resource}"


def test_other_errors_do_not_exhaust_a_process() -> None:
    assert describe_exhaustion(_wrap(OSError(errno.ENOENT, "No such file"))) == ""
    circle = ValueError()
    circle.__cause__ = circle
    assert describe_exhaustion(circle) == ""


@pytest.mark.parametrize(("num_waits", "expected"), [(0, 750_000), (1, None)])
def test_request_that_waited_does_not_count_as_one_that_computes(num_waits: int, expected: int | None) -> None:
    def used(user: float, system: float, num_waits: int, num_preemptions: int) -> resource.struct_rusage:
        return resource.struct_rusage((user, system, *[0] * 12, num_waits, num_preemptions))

    assert _count_computed(used(1.0, 0.5, 7, 1), used(1.5, 0.75, 7 + num_waits, 90)) == expected
