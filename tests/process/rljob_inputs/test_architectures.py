"""The table of architectures is what the installed transformers and vLLM give."""

import subprocess
import sys

import pytest

from tests.paths import ROOT


@pytest.mark.slow
@pytest.mark.nightly  # it changes only with their versions
def test_table_is_made_from_the_installed_libraries():
    command = [sys.executable, "-m", "dev.architectures", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
