"""How the head's program begins and ends."""

import os
import subprocess
import sys

import pytest

from rljob_api.contract import ExitCode
from rljob_api.errors import UserError
from rljob_trainer.head_environment import read_environment


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
    code = "import sys, rljob_trainer.head; assert 'ray' not in sys.modules, 'Ray reads its environment at import'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
