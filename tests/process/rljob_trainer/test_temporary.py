"""What a killed process leaves in temporary folders is removed by the next one, and by no sooner one."""

import subprocess
import sys

from rljob_trainer.temporary import TemporaryFolder

_PROGRAM = """
import pathlib, sys, time
from rljob_trainer.temporary import TemporaryFolder
folder = TemporaryFolder("ray", pathlib.Path(sys.argv[1]))
print(folder.name, flush=True)
time.sleep(600)
"""


def test_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path):
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        name = process.stdout.readline().strip()
        with TemporaryFolder("ray", tmp_path) as mine:
            assert {str(path) for path in tmp_path.iterdir()} == {name, mine}
        process.kill()
        process.wait()
        assert [str(path) for path in tmp_path.iterdir()] == [name], "nothing is cleaned up yet"
    with TemporaryFolder("ray", tmp_path) as mine:
        assert [str(path) for path in tmp_path.iterdir()] == [mine]
