import pytest
import torch
from policy_load.peak import known_peak, measure_peak


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak_follows_from_the_name_of_the_device(name, tera):
    assert known_peak(name, torch.bfloat16) == (tera and tera * 1e12)
    assert known_peak(name, torch.float32) is None, "the stated peaks are for 16 bits"


def test_peak_of_a_cpu_is_measured(monkeypatch):
    monkeypatch.setattr("policy_load.peak._SECONDS", {"cpu": 0.0})
    monkeypatch.setattr("policy_load.peak._SIZE", {"cpu": 32})
    clock = iter([10.0, 10.5, 12.0])
    monkeypatch.setattr("policy_load.peak._now", lambda device: next(clock))
    monkeypatch.setattr("policy_load.peak._SECONDS", {"cpu": 1.0})
    assert measure_peak(torch.device("cpu"), torch.float32) == 4 * 2 * 32**3 / 2.0
