"""What stays whole on a rank, by the size of the model and of the device."""

from types import SimpleNamespace

import pytest
import torch

from rljob_trainer.policy.sharding import ShardingMode, choose_mode

GIB = 2**30
BILLION = 10**9


@pytest.fixture(autouse=True)
def device_with_80_gib(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))


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
    cuda = torch.device("cuda", 0)
    assert choose_mode(int(num_parameters), int(num_frozen), torch.bfloat16, cuda) == expected


def test_cpu_takes_the_fastest_mode():
    mode = choose_mode(32 * BILLION, 0, torch.bfloat16, torch.device("cpu"))
    assert mode == ShardingMode(keep_gathered=True, reduce_once=True)
