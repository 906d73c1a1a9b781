"""vLLM's worker on CPUs, which really sleeps: vLLM's own ignores the request.

Level 1 frees the cache, level 2 the weights, too. Waking up allocates nothing: memory is there again once it is
touched. Invariant: after level 2, each packed copy of a layer fails until the layer is loaded again.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, cast

from torch import Tensor, nn
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.worker.cpu_worker import CPUWorker

from rljob_trainer.weights.heap import return_freed_memory

_MADV_DONTNEED = 4  # madvise(2)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def drop_pages(tensors: Iterable[Tensor]) -> None:
    """Give back the memory of the tensors' storages. OSError if the system refuses, as for locked memory.

    The tensors keep their addresses, so that views and kernels stay valid. Afterwards their content is zeros, except
    for the first and the last page.
    """
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    for address, num_bytes in storages.items():
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and _libc.madvise(begin, end - begin, _MADV_DONTNEED):
            error = ctypes.get_errno()
            raise OSError(error, f"madvise: {os.strerror(error)}")


class SleepingCPUWorker(CPUWorker):
    def sleep(self, level: int = 1) -> None:
        drop_pages(self.model_runner.kv_caches)
        if level == 2:
            drop_weights(cast(nn.Module, self.model_runner.get_model()))
        return_freed_memory()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing: see the module."""


def drop_weights(model: nn.Module) -> None:
    """Free what the next load replaces: parameters, packed copies, and what is computed from
    parameters. Buffers stay."""
    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):
            cast(Any, layer).cpu_linear = _fail
    drop_pages(_loaded_tensors(model))


def _loaded_tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    for layer in model.modules():
        if isinstance(layer, MLAAttention):
            yield from (cast(Tensor, layer.W_UK_T), cast(Tensor, layer.W_UV))


def _fail(*_: object) -> NoReturn:
    raise RuntimeError("a layer computes with weights that were dropped and not loaded again")
