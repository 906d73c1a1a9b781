"""What a rank says about itself."""

import os

from rljob_trainer.ranks import heartbeat


def test_stacks_name_the_line_that_runs():
    assert "test_stacks_name_the_line_that_runs" in heartbeat.dump_stacks()


def test_only_a_rank_is_described(monkeypatch):
    assert heartbeat.describe_process(os.getpid()) == "", "in another Pod, the same number is another process"
    monkeypatch.setattr(heartbeat, "PROCESS_NAME", b"")
    assert heartbeat.describe_process(os.getpid()).startswith(("R", "S"))
    assert heartbeat.describe_process(2**22 + 1) == ""
