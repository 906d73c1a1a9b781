"""The stacks of a process, which processes may be asked for theirs, and in which state a process is."""

import os
import signal
from pathlib import Path

from rljob_trainer.liveness.stacks import STACKS_SIGNAL, catches, describe_process, read_stacks


def test_only_a_process_with_a_handler_gets_the_signal():
    before = signal.signal(STACKS_SIGNAL, lambda *_: None)
    try:
        assert catches(os.getpid(), STACKS_SIGNAL)
    finally:
        signal.signal(STACKS_SIGNAL, signal.SIG_DFL)
    assert not catches(os.getpid(), STACKS_SIGNAL), "its default is to end the process"
    assert not catches(2**22 + 1, STACKS_SIGNAL)
    signal.signal(STACKS_SIGNAL, before)


def test_stacks_name_the_line_that_runs():
    assert "test_stacks_name_the_line_that_runs" in read_stacks()


def test_only_the_process_that_is_meant_is_described():
    name = Path("/proc/self/cmdline").read_bytes()[:4]
    assert describe_process(os.getpid(), b"ray::RankProcess") == "", "in another Pod, the number is another process's"
    assert describe_process(os.getpid(), name).startswith(("R", "S"))
    assert describe_process(2**22 + 1, b"") == ""
