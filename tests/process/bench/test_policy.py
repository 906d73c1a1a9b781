"""`make bench-policy` on a tiny shape: its figures, and that it needs neither Ray nor vLLM."""

import json
import subprocess
import sys

import pytest

_RUN = """
import runpy, sys
sys.path.insert(0, "bench")
sys.argv = ["bench/policy.py", *sys.argv[1:]]
runpy.run_path("bench/policy.py", run_name="__main__")
found = {"ray", "vllm", "aiohttp", "kopf", "kubernetes", "rljob_cli", "rljob_operator"} & set(sys.modules)
assert not found, f"imported {found}"
"""


def test_bench_measures_an_update_without_ray_vllm_or_a_server():
    arguments = ["--model", "tiny", "--rows", "groups", "--dtype", "float32", "--device", "cpu", "--threads", "1"]
    sizes = ["--num-rows", "8", "--prompt-tokens", "16", "--answer-tokens", "16", "--group-size", "4"]
    command = [sys.executable, "-c", _RUN, *arguments, *sizes, "--warmup", "0", "--updates", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    result = json.loads(last)["result"]
    assert 0 < result["share_of_peak"] < 1
    assert result["is_peak_measured"]
    assert result["padding"] == 0, "two trees of equal length"
    assert result["peak_memory_bytes"] > 0
    assert set(result["seconds"]) == {"plan", "accumulate", "optimizer"}
    # Of 8 x 32 tokens of rows, 2 x 16 + 8 x 15 must be computed.
    assert result["tokens_per_second"] / result["row_tokens_per_second"] == pytest.approx(152 / 256)
