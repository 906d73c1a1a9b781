"""What stays whole on a rank, by the size of the model and of the device."""

from types import SimpleNamespace

import pytest
import torch

from rljob_trainer.policy.sharding import ShardingMode, choose_mode, find_smallest_memory

GIB = 2**30
BILLION = 10**9


@pytest.mark.parametrize(
    ("num_parameters", "num_frozen", "expected"),
    [
        (0.5 * BILLION, 0, ShardingMode(keep_gathered=True, reduce_once=True)),
        (7 * BILLION, 0, ShardingMode(keep_gathered=True, reduce_once=False)),
        (7 * BILLION, 7 * BILLION, ShardingMode(keep_gathered=False, reduce_once=False)),
        (32 * BILLION, 0, ShardingMode(keep_gathered=False, reduce_once=False)),
    ],
)
def test_gradients_and_parameters_stay_whole_while_they_fit(num_parameters, num_frozen, expected):
    assert choose_mode(int(num_parameters), int(num_frozen), torch.bfloat16, 80 * GIB) == expected


def test_cpu_takes_the_fastest_mode():
    mode = choose_mode(32 * BILLION, 0, torch.bfloat16, None)
    assert mode == ShardingMode(keep_gathered=True, reduce_once=True)


@pytest.mark.parametrize(("sizes", "smallest"), [((80, 24), 24), ((24, 80), 24)])
def test_the_smallest_gpu_decides_for_all_ranks(sizes, smallest, monkeypatch):
    own, other = sizes
    memory = SimpleNamespace(total_memory=own * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda value, device: tensor(value))  # no GPU is here

    def reduce(value, operation):
        assert operation == torch.distributed.ReduceOp.MIN
        value.clamp_(max=other * GIB)

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    assert find_smallest_memory(torch.device("cuda", 0)) == smallest * GIB
    assert find_smallest_memory(torch.device("cpu")) is None
