"""`make bench-driver` on a small step: its figures, and that a history is as large after many steps as after few."""

import json
import subprocess
import sys

from tests.paths import ROOT


def test_bench_measures_the_loop_while_its_servers_are_polled():
    sizes = ["--episodes", "32", "--tokens", "200", "--group-size", "8", "--steps", "3", "300"]
    done = subprocess.run(
        [sys.executable, "bench/driver.py", *sizes], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    result = json.loads(last)
    parts = result["parts"]
    assert set(parts) == {"idle", "rows", "ship", "free", "records", "log"}
    assert min(parts["idle"]["status_p99_ms"], parts["idle"]["gateway_p99_ms"]) > 0, "both were polled"
    assert all(part["held_ms"] <= part["gap_ms"] for part in parts.values())
    few, many = (result["history"][steps]["driver_json_bytes"] for steps in ("3", "300"))
    assert abs(many - few) < 16, "no list of all steps"
    assert set(result["completions"]) == {"4000", "32000"}
