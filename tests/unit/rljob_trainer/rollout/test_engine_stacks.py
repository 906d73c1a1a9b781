"""Which processes may be asked for their stacks."""

import os
import signal

from rljob_trainer.rollout.engine_stacks import STACKS_SIGNAL, catches


def test_only_a_process_with_a_handler_gets_the_signal():
    before = signal.signal(STACKS_SIGNAL, lambda *_: None)
    try:
        assert catches(os.getpid(), STACKS_SIGNAL)
    finally:
        signal.signal(STACKS_SIGNAL, signal.SIG_DFL)
    assert not catches(os.getpid(), STACKS_SIGNAL), "its default is to end the process"
    assert not catches(2**22 + 1, STACKS_SIGNAL)
    signal.signal(STACKS_SIGNAL, before)
