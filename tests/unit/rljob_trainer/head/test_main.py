"""How the head's program begins and ends."""

import os
import subprocess
import sys

import pytest

from rljob_api.errors import UserError
from rljob_api.wire.contract import ExitCode
from rljob_trainer.head.environment import read_environment


def test_what_is_missing_is_named():
    with pytest.raises(UserError, match=r"lacks RLJOB_RUN_DIR.*RLJOB_REWARD_SERVICES"):
        read_environment({"RLJOB_JOB_FILE": "/x"})


def test_the_users_mistake_is_the_last_line_and_exit_code_78():
    ended = subprocess.run(
        [sys.executable, "-m", "rljob_trainer.head"],
        env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == ExitCode.USER
    assert ended.stderr.splitlines()[-1].startswith("the environment lacks")


def test_nothing_imports_ray_before_its_environment_is_set():
    code = "import sys, rljob_trainer.head.main; assert 'ray' not in sys.modules, 'Ray reads its environment at import'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def run_program(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_a_signal_before_there_is_a_run_is_not_lost():
    code = """
import os, signal, sys
from rljob_trainer import head
def read_environment(_):
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal was lost")
head.read_environment = read_environment
sys.exit(head.main())
"""
    ended = run_program(code)
    assert ended.returncode == ExitCode.INFRASTRUCTURE, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("stopped by a signal")


def test_thousands_of_requests_in_flight_do_not_run_into_the_default_limit_of_open_files():
    code = """
import resource
from rljob_trainer import head
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
def read_environment(_):
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise SystemExit(0 if soft == (hard if 0 <= hard < 65_536 else 65_536) else f"{soft} of {hard}")
head.read_environment = read_environment
head.main()
"""
    ended = run_program(code)
    assert ended.returncode == 0, ended.stderr


def test_a_signal_ends_the_run_in_order_and_even_when_a_thread_does_not_end():
    code = """
import asyncio, os, signal, sys, threading, time, types
from rljob_trainer import head
async def run_head(environment, on_ray):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)  # a download, say
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await asyncio.sleep(600)
    finally:
        print("ended in order", flush=True)
sys.modules["rljob_trainer.head.wiring"] = types.SimpleNamespace(run_head=run_head)
head.read_environment = lambda _: None
head._STOP_SECONDS = 0.5
sys.exit(head.main())
"""
    ended = run_program(code)
    assert ended.returncode == ExitCode.INFRASTRUCTURE, ended.stderr
    assert ended.stdout == "ended in order\n"
    assert "did not end in time" in ended.stderr.splitlines()[-1]


def test_an_error_ends_the_run_even_when_a_thread_does_not_end():
    code = """
import asyncio, sys, time, types
from rljob_api.errors import UserError
from rljob_trainer import head
async def run_head(environment, on_ray):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)  # it waits for a Ray head that has died
    raise UserError("the words")
sys.modules["rljob_trainer.head.wiring"] = types.SimpleNamespace(run_head=run_head)
head.read_environment = lambda _: None
head._FAIL_SECONDS = 0.5
sys.exit(head.main())
"""
    ended = run_program(code)
    assert ended.returncode == ExitCode.USER, ended.stderr
    assert ended.stderr.splitlines()[-1] == "the words"
