"""Which process is found as the supervisor of a state folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from rljob_cluster.lifecycle.supervisor import find_process


@pytest.mark.parametrize(("argument", "is_found"), [("rljob_cluster", True), ("another program", False)])
def test_supervisor_is_found_by_pid_and_command_line(argument: str, is_found: bool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert find_process(tmp_path) is None, "no pid file"
    with subprocess.Popen([sys.executable, "-c", "input()", argument], stdin=subprocess.PIPE) as process:
        (tmp_path / "run/pid").write_text(str(process.pid))
        found = find_process(tmp_path)
        assert (found is not None and found.pid == process.pid) == is_found
        process.kill()
    assert find_process(tmp_path) is None, "it has exited"
