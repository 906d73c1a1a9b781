"""How a rank allocates its device's memory, what it holds, and what it gives back."""

import numpy as np
import pytest
import torch

from rljob_trainer.weights.heap import configure_allocator, held_bytes, release_unused

CPU = torch.device("cpu")
SIZE = 64 * 2**20


def test_memory_of_the_cpu_is_that_of_the_process_and_goes_back():
    release_unused(CPU)  # what earlier tests have left would be used again
    before = held_bytes(CPU)
    # Below glibc's threshold for mmap: it is in the heap, which keeps it.
    blocks = [np.ones(2**16 // 8) for _ in range(SIZE // 2**16)]
    assert held_bytes(CPU) - before > 0.9 * SIZE
    last = blocks.pop()  # near the heap's end, so that what is freed is within it
    blocks.clear()
    release_unused(CPU)
    assert held_bytes(CPU) - before < 0.3 * SIZE
    assert last.all()


def test_torch_understands_the_settings_of_the_allocator():
    environment = {}
    configure_allocator(environment)
    settings = environment["PYTORCH_ALLOC_CONF"]
    assert settings == "expandable_segments:True,pinned_max_round_threshold_mb:1"
    torch._C._accelerator_setAllocatorSettings(settings)  # it raises an error for a key that it does not know


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_settings_of_the_allocator_stay(name):
    environment = {name: "mine"}
    configure_allocator(environment)
    assert environment == {name: "mine"}
