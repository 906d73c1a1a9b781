"""Running the steps of `make accept-gpu`: limits, skipped ones, logs, and results that stay."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
from acceptance import runner
from acceptance.checks import Check
from acceptance.judgements import BrokenError, succeed
from acceptance.runner import read_results, run_checks

from tests.support.waiting import DEADLINE_SECONDS


def shell(text):
    return ("/bin/sh", "-c", text)


def run(tmp_path, *checks, has_gpu=False):
    found = run_checks(checks, tmp_path, has_gpu=has_gpu, folder=tmp_path, machine={"device": "CPUs"})
    return {result.name: result for result in found}


def step(name, *commands, judge=succeed, seconds=10, needs_gpu=False):
    return Check(name, "", commands, seconds, judge, needs_gpu)


def test_results_are_held_failed_or_skipped_with_a_reason(tmp_path):
    found = run(
        tmp_path,
        step("both", shell("echo one"), shell("echo two >&2")),
        step("broken", shell("echo why; exit 4")),
        step("gpu", shell("exit 1"), needs_gpu=True),
        step("no-file", judge=lambda ended: (tmp_path / "none").read_text()),
    )
    assert [(result.state, result.found) for result in found.values()][:3] == [
        ("held", "two"),
        ("failed", "command 1 ended with 4: why"),
        ("skipped", "needs a GPU"),
    ]
    assert found["no-file"].found.startswith("FileNotFoundError")
    assert (tmp_path / "both.log").read_text() == "$ /bin/sh -c echo one\none\n\n$ /bin/sh -c echo two >&2\ntwo\n\n"
    assert (found["both"].end, found["broken"].end) == ("", "$ /bin/sh -c echo why; exit 4\nwhy\n\n")


def test_judge_gets_the_output_of_each_command_alone(tmp_path):
    outputs = []

    def judge(ended):
        outputs.extend(each.output for each in ended)
        return ""

    run(tmp_path, step("three", shell("echo ä"), shell("echo one"), shell("true"), judge=judge))
    assert outputs == ["ä\n", "one\n", ""]


def test_a_step_leaves_the_results_of_other_calls_and_replaces_its_own(tmp_path):
    a, b = step("a", shell("echo first; exit 1")), step("b", shell("echo b"))
    run(tmp_path, a, b)
    run(tmp_path, step("a", shell("echo second")))
    found = list(read_results([b, a, step("never")], tmp_path))
    assert [(result.name, result.state, result.found) for result in found] == [
        ("b", "held", "b"),
        ("a", "held", "second"),
    ]
    assert found[0].machine == {"device": "CPUs"}
    assert "first" not in (tmp_path / "a.log").read_text()


def test_result_and_log_of_a_step_that_runs_are_there_already(tmp_path):
    seen = {}

    def judge(ended):
        seen.update(json.loads((tmp_path / "slow.json").read_text()))
        seen["log"] = (tmp_path / "slow.log").read_text()
        raise BrokenError("later")

    found = run(tmp_path, step("slow", shell("echo so far"), judge=judge))
    assert (seen["state"], seen["found"]) == ("failed", "did not end"), "a machine that goes away leaves this"
    assert "so far" in seen["log"]
    assert found["slow"].found == "later"


def test_command_that_does_not_end_is_stopped_with_its_children(tmp_path):
    started = time.monotonic()
    sleep = f"{sys.executable} -c 'import time; time.sleep(600)'"
    found = run(tmp_path, step("slow", shell(f"echo begun; {sleep} & {sleep}"), shell("echo never"), seconds=1))
    assert (found["slow"].state, found["slow"].found) == ("failed", "did not end within 1 s")
    assert time.monotonic() - started < DEADLINE_SECONDS, "it waits for a child"
    assert "begun" in found["slow"].end
    assert "never" not in (tmp_path / "slow.log").read_text()


def test_a_step_ends_with_the_program_that_is_stopped(tmp_path, monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            started.append(self)
            if len(started) == 1:
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(runner.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, step("slow", ("/bin/sleep", "600"), seconds=600))
    assert started[0].returncode == -signal.SIGTERM
    assert json.loads((tmp_path / "slow.json").read_text())["found"] == "did not end"
