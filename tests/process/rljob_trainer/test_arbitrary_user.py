"""The programs of the trainer image run as a user without a name in group 0, as OpenShift starts Pods."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.paths import ROOT

AS_ARBITRARY_USER = ["unshare", "--user", "--map-user=123456", "--map-group=0"]
NAMES = """
import getpass, os, pwd
try:
    raise SystemExit(pwd.getpwuid(os.getuid()).pw_name)
except KeyError:
    pass
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
print(os.getuid(), os.getgid(), getpass.getuser(), os.path.expanduser("~"), default_cache_dir())
"""


def can_be_another_user():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*AS_ARBITRARY_USER, "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_be_another_user(), reason="needs user namespaces")


def read_image_environment():
    """Return the variables that the image sets, except PATH."""
    line = re.search(r"^ENV (.*)$", (ROOT / "trainer_image/Dockerfile").read_text(), re.MULTILINE)[1]
    return dict(variable.split("=", 1) for variable in line.split() if not variable.startswith("PATH="))


def run(*arguments):
    return subprocess.run(
        [*AS_ARBITRARY_USER, sys.executable, *arguments],
        env=read_image_environment() | {"PATH": os.environ["PATH"], "RLJOB_TERMINATION_LOG": os.devnull},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_user_and_home_come_from_the_image():
    done = run("-c", NAMES)
    assert done.stdout.split() == ["123456", "0", "rljob", "/tmp", "/tmp/torchinductor_rljob"], done.stderr


@pytest.mark.parametrize("program", ["head", "worker", pytest.param("rollout", marks=pytest.mark.slow)])
def test_program_starts_and_reads_its_environment(program):
    done = run("-m", f"rljob_trainer.{program}")
    assert "RLJOB_JOB_FILE" in done.stderr.splitlines()[-1], done.stderr
