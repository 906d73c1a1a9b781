"""The functions of vLLM and torch on which a weight update on the device relies are those that were read. Nothing is
imported that takes long.

After an upgrade, read what changed, and then record it here. On GPUs nothing else notices a change.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from tests.unit.rljob_trainer.rollout.test_vllm_sleep import digest

READ = {
    # Who calls the engine, on which stream and device, and what follows an error.
    "vllm v1/worker/gpu_worker.py Worker._start_weight_update": "262ccf28304d",
    "vllm v1/worker/gpu_worker.py Worker.update_weights": "66b1e17abbce",
    "vllm v1/worker/gpu_worker.py Worker.finish_weight_update": "797be70efe6a",
    "vllm distributed/weight_transfer/base.py WeightTransferEngine": "a7ba5a1d0e7e",
    # How long a layer's loader keeps the tensors that it got.
    "vllm model_executor/model_loader/reload/layerwise.py make_online_process_loader": "0b4d0e82972f",
    "vllm model_executor/model_loader/reload/layerwise.py _layerwise_process": "2b702b90986e",
    # Why vLLM's own engine is not used: see docs/one-gpu.md.
    "vllm distributed/weight_transfer/ipc_engine.py IPCWeightTransferEngine.receive_weights": "eff38004e38e",
    "vllm distributed/weight_transfer/ipc_engine.py IPCWeightTransferUpdateInfo": "b6ce079b65b7",
    "vllm distributed/weight_transfer/packed_tensor.py packed_ipc_producer": "c049460d42fb",
    "torch multiprocessing/reductions.py reduce_tensor": "8736889950ef",
    "torch multiprocessing/reductions.py rebuild_cuda_tensor": "aae9285a1906",
}


@pytest.mark.parametrize("place", READ)
def test_function_is_the_one_that_was_read(place: str) -> None:
    package, _, rest = place.partition(" ")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    found = digest(Path(spec.submodule_search_locations[0]), rest)
    assert found == READ[place], f"{place} has changed: read it, then record {found}"


def test_torch_has_what_the_device_needs() -> None:
    if torch.cuda.current_stream.__module__ == torch.cuda.__name__:  # vLLM replaces it on a machine without a GPU
        assert "device" in inspect.signature(torch.cuda.current_stream).parameters
    assert "device" in inspect.signature(torch.cuda.get_device_properties).parameters
    if torch.version.cuda is not None:
        assert hasattr(torch._C._CudaDeviceProperties, "uuid"), "rank and engine meet by it"
