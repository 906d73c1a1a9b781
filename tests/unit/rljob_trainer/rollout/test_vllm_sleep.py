"""The functions of vLLM that sleeping needs are those that were read. The test does not import vLLM, which takes long.

After an upgrade, read what changed, and then record it here. On GPUs nothing else notices a change.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from pathlib import Path

import pytest

READ = {
    # The order of pause, sleep, wake and resume; what a wake-up with one tag leaves asleep.
    "v1/engine/async_llm.py AsyncLLM.sleep": "6943fae28586",
    "v1/engine/async_llm.py AsyncLLM.wake_up": "27f6467e4654",
    "v1/engine/core.py EngineCore.sleep": "dac08e1d1561",
    "v1/engine/core.py EngineCore.wake_up": "795863e446db",
    "v1/engine/core.py EngineCore.resume_scheduler": "fd55b742b89d",
    "v1/executor/abstract.py Executor.sleep": "dfdde897f50b",
    "v1/executor/abstract.py Executor.wake_up": "c3a2883fc612",
    # What the levels mean on GPUs.
    "v1/worker/gpu_worker.py Worker.sleep": "50d938c82974",
    "v1/worker/gpu_worker.py Worker.wake_up": "9d04dd2e03a5",
    "device_allocator/sleep_mode_backend.py CuMemBackend.suspend": "f40af1b9fcb1",
    "device_allocator/sleep_mode_backend.py CuMemBackend.resume": "1e77c669b764",
    # What SleepingCPUWorker replaces, and the memory that it frees.
    "v1/worker/cpu_worker.py CPUWorker.sleep": "7d1bac3265b1",
    "v1/worker/cpu_worker.py CPUWorker.wake_up": "220417a2b597",
    "v1/worker/utils.py allocate_kv_cache": "8b5b509c2b7e",
    "model_executor/layers/utils.py dispatch_cpu_unquantized_gemm": "b65f36ce5557",
}


def digest(root: Path, place: str) -> str:
    """Return the digest of a function's code, without comments."""
    file, _, name = place.partition(" ")
    node: ast.AST = ast.parse((root / file).read_text())
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next(each for each in ast.iter_child_nodes(node) if isinstance(each, kinds) and each.name == part)
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()[:12]


@pytest.mark.parametrize("place", READ)
def test_function_is_the_one_that_was_read(place: str) -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    found = digest(Path(spec.submodule_search_locations[0]), place)
    assert found == READ[place], f"vLLM's {place} has changed: read it, then record {found}"
