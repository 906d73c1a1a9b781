"""How the head's program starts and exits."""

import os
import subprocess
import sys

import pytest

from rljob_api.wire.contract import ExitCode

ENVIRONMENT = {"PATH": os.environ["PATH"], "RLJOB_TERMINATION_LOG": os.devnull}


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )


def run_head(setup: str) -> subprocess.CompletedProcess[str]:
    """Run the head's main() in a process after `setup`, which replaces functions of the module `head`."""
    return run_python("-c", f"from rljob_trainer.head import main as head\n{setup}\nimport sys; sys.exit(head.main())")


def test_user_error_is_the_last_line_and_exit_code_78():
    ended = run_python("-m", "rljob_trainer.head")
    assert ended.returncode == ExitCode.USER
    assert ended.stderr.splitlines()[-1].startswith("error: environment variables not set: RLJOB_JOB_FILE")


def test_termination_message_is_the_error_and_not_the_log(tmp_path):
    path = tmp_path / "termination-log"
    ended = subprocess.run(
        [sys.executable, "-m", "rljob_trainer.head"],
        env=ENVIRONMENT | {"RLJOB_TERMINATION_LOG": str(path)}, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == ExitCode.USER
    assert path.read_text().startswith("error: environment variables not set")


def test_import_of_main_does_not_import_ray():
    code = "import sys, rljob_trainer.head.main; assert 'ray' not in sys.modules, 'Ray reads its environment at import'"
    ended = run_python("-c", code)
    assert ended.returncode == 0, ended.stderr


def test_a_head_with_a_tokenizer_imports_no_torch():
    code = """
import sys
from rljob_trainer.head.main import import_transformers_alone
import_transformers_alone()
import rljob_trainer.head.wiring
from transformers import AutoTokenizer, PreTrainedTokenizerFast
found = [name for name in sys.modules if name.partition(".")[0] == "torch"]
assert not found, found
"""
    ended = run_python("-c", code)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_signal_before_the_run_is_not_lost():
    ended = run_head("""
import os, signal
def read_environment(_):
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal was lost")
head.read_environment = read_environment
""")
    assert ended.returncode == ExitCode.INFRASTRUCTURE, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: stopped by a signal")


def test_limit_of_open_files_is_raised_for_thousands_of_requests():
    ended = run_head("""
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
def read_environment(_):
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise SystemExit(0 if soft == (hard if 0 <= hard < 65_536 else 65_536) else f"{soft} of {hard}")
head.read_environment = read_environment
""")
    assert ended.returncode == 0, ended.stderr


RUN_WITH_STUCK_THREAD = """
import asyncio, os, signal, sys, time, types
from rljob_api.errors import UserError
async def run_head(environment, on_ray, on_stopped):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)  # for example a download
    try:
        {body}
    finally:
        print("ended in order", flush=True)
sys.modules["rljob_trainer.head.wiring"] = types.SimpleNamespace(run_head=run_head)
model = types.SimpleNamespace(trust_remote_code=True)
job = types.SimpleNamespace(spec=types.SimpleNamespace(model=model))
head.read_environment = lambda _: types.SimpleNamespace(grace_seconds=1.0, job=job)
head._STOP_SHARE = head._FAIL_SECONDS = 0.3
"""


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (
            "os.kill(os.getpid(), signal.SIGTERM); await asyncio.sleep(600)",
            ExitCode.INFRASTRUCTURE,
            "stopped by a signal; a restart resumes from the last checkpoint; it did not end in time",
        ),
        (
            "os.kill(os.getpid(), signal.SIGTERM); await asyncio.sleep(600)\n"
            "    except asyncio.CancelledError:\n"
            "        on_stopped('step 3 is saved'); raise",
            ExitCode.INFRASTRUCTURE,
            "stopped by a signal; a restart resumes from the last checkpoint; step 3 is saved",
        ),
        ('raise UserError("the message")', ExitCode.USER, "the message"),
    ],
    ids=["signal", "signal with a report", "error"],
)
def test_run_ends_in_order_and_in_time_despite_a_stuck_thread(body, code, message):
    ended = run_head(RUN_WITH_STUCK_THREAD.format(body=body))
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == "ended in order\n"
    assert ended.stderr.splitlines()[-1] == f"error: {message}"


def test_success_ends_the_process_though_a_client_of_a_tracker_still_waits():
    ended = run_head("""
import asyncio, threading
async def run(_):
    threading.Thread(target=threading.Event().wait).start()  # as wandb's, for its server
head._run_until_signalled = run
head._FAIL_SECONDS = 0.1
head.read_environment = lambda _: None
""")
    assert ended.returncode == ExitCode.SUCCEEDED, ended.stderr
