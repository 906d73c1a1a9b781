"""Builds the commands once, as a process of its own does, and not in each call of a test."""

import functools
from pathlib import Path

import pytest
import typer.testing

typer.testing._get_command = functools.cache(typer.testing._get_command)


@pytest.fixture(autouse=True)
def vllm_for_gpus(monkeypatch):
    """Whatever is installed here; tests/unit/test_printed_commands.py has the build for CPUs."""
    monkeypatch.setattr("rljob_cli.run.summary.find_builds", lambda: {"vllm": "0.32.0"})


@pytest.fixture(autouse=True)
def reads_in_this_process(monkeypatch):
    """Unit tests start no process; tests/process/rljob_inputs/machine/test_bounded.py has the one that reads files."""
    monkeypatch.setattr("rljob_inputs.machine.bounded._CAN_FORK", False)


@pytest.fixture(autouse=True)
def no_copies_in_this_checkout(monkeypatch):
    """Whatever `make demo` has written here."""
    monkeypatch.setattr("rljob_cli.check.job_source._CHECKOUT", Path("/nowhere"))
