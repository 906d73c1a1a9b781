"""Running the checks of `make accept-gpu`: limits, skipped ones, logs and the table."""

from __future__ import annotations

import sys
import time

from acceptance.checks import Check
from acceptance.judgements import succeed
from acceptance.runner import run_checks


def shell(text):
    return ("/bin/sh", "-c", text)


def run(tmp_path, *checks, has_gpu=False):
    return {result.name: result for result in run_checks(checks, tmp_path, has_gpu=has_gpu, folder=tmp_path)}


def test_results_are_held_failed_or_skipped_with_a_reason(tmp_path):
    found = run(
        tmp_path,
        Check("a b", (shell("echo one"), shell("echo two >&2")), 10, succeed),
        Check("broken", (shell("echo why; exit 4"),), 10, succeed),
        Check("gpu", (shell("exit 1"),), 10, succeed, needs_gpu=True),
        Check("follows", (), 0, lambda ended: "read", after="a b"),
        Check("follows broken", (), 0, lambda ended: "read", after="broken"),
        Check("no file", (), 0, lambda ended: (tmp_path / "none").read_text()),
    )
    assert [(result.state, result.found) for result in found.values()][:5] == [
        ("held", "two"),
        ("failed", "command 1 ended with 4: why"),
        ("skipped", "needs a GPU"),
        ("held", "read"),
        ("skipped", "needs what broken leaves"),
    ]
    assert found["no file"].found.startswith("FileNotFoundError")
    assert (tmp_path / "a-b.log").read_text() == "$ /bin/sh -c echo one\none\n\n$ /bin/sh -c echo two >&2\ntwo\n\n"


def test_command_that_does_not_end_is_stopped_with_its_children(tmp_path):
    started = time.monotonic()
    sleep = f"{sys.executable} -c 'import time; time.sleep(600)'"
    found = run(tmp_path, Check("slow", (shell(f"{sleep} & {sleep}"), shell("echo never")), 1, succeed))
    assert (found["slow"].state, found["slow"].found) == ("failed", "did not end within 1 s")
    assert time.monotonic() - started < 30, "a child holds the pipe"
    assert "never" not in (tmp_path / "slow.log").read_text()
