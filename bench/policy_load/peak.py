"""What the device can do at most: dense matrix products per second, by its name or measured."""

from __future__ import annotations

import time

import torch

_TERA = 1e12
BF16_PEAKS: tuple[tuple[str, float], ...] = (
    ("GH200", 989 * _TERA),
    ("B200", 2250 * _TERA),
    ("H200", 989 * _TERA),
    ("H100 PCIe", 756 * _TERA),
    ("H100 NVL", 835 * _TERA),
    ("H100", 989 * _TERA),
    ("A100", 312 * _TERA),
)
"""Operations per second in bf16 and fp16 without sparsity, by NVIDIA's data sheets. The first name that is part of the
device's counts."""
_SIZE = {"cpu": 1024, "cuda": 8192}
_SECONDS = {"cpu": 1.0, "cuda": 0.5}


def known_peak(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the operations per second that NVIDIA states; None for another device or fp32."""
    if dtype == torch.float32:
        return None
    return next((peak for name, peak in BF16_PEAKS if name.lower() in device_name.lower()), None)


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of products of square matrices."""
    size = _SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    result = left @ right
    count, started = 0, _now(device)
    while (seconds := _now(device) - started) < _SECONDS[device.type]:
        for _ in range(4):
            torch.matmul(left, right, out=result)
        count += 4
    return count * 2 * size**3 / seconds


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
