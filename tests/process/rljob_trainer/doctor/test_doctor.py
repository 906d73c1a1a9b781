"""The doctor as its own process, on a machine without GPUs."""

import json
import subprocess
import sys


def test_doctor_finds_the_missing_gpu_and_checks_everything_else():
    command = [sys.executable, "-m", "rljob_trainer.doctor", "--gpus", "1", "--ranks", "2", "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["devices"]["state"] == "failed"
    assert "--gpus is 1, and torch finds no GPU" in found["devices"]["remedy"]
    assert found["bf16 on cpu"]["state"] == found["all-reduce of 2"]["state"] == "ok"
    assert "torch" in found["versions"]["found"]
