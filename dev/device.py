"""Chooses what `make install` installs for: `python3 dev/device.py` prints cpu or gpu, and on stderr why.

It runs before anything is installed, with the standard library alone. Invariant: a machine with a GPU that the locked
torch cannot use gets no CPU installation unasked: the exit code is 1, and the message says what to do.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "inputs"))

from rljob_inputs.machine.nvidia import Nvidia, look

MIN_DRIVER = 580
"""What CUDA 13.0 needs, for which the locked torch is built. tests/unit/dev/test_device.py compares it with uv.lock."""
MIN_CAPABILITY = 7.5
"""CUDA 13 has dropped the GPUs before Turing."""
_EITHER = "or choose yourself: make DEVICE=cpu install, or make DEVICE=gpu install"
_CPU = "to install for CPUs all the same: make DEVICE=cpu install"


@dataclass(frozen=True)
class Choice:
    device: str
    """cpu or gpu; empty if the machine must be repaired, or the user must choose."""
    reason: str


def choose(found: Nvidia) -> Choice:
    """Return what to install for. Pure."""
    driver = found.gpus[0].driver if found.gpus else found.driver
    if found.gpus or found.devices:
        if driver and int(driver.partition(".")[0]) < MIN_DRIVER:
            where = "on Windows" if found.is_wsl else "on this machine"
            return Choice(
                "",
                f"NVIDIA's driver is {driver}, and the locked torch needs {MIN_DRIVER} or later (CUDA 13): upgrade it "
                f"{where}; {_CPU}",
            )
        if found.gpus and all((gpu.capability or MIN_CAPABILITY) < MIN_CAPABILITY for gpu in found.gpus):
            gpu = found.gpus[0]
            return Choice(
                "",
                f"{gpu.name} has compute capability {gpu.capability}, and the locked torch needs {MIN_CAPABILITY} or "
                f"later (CUDA 13); {_CPU}",
            )
    if found.gpus:
        number = f"{len(found.gpus)} GPU{'s' if len(found.gpus) > 1 else ''}"
        return Choice("gpu", f"nvidia-smi lists {number} ({found.gpus[0].name}, driver {driver})")
    if found.devices and not found.smi:
        return Choice("gpu", f"/dev/nvidia{found.devices[0]} exists (driver {driver or 'unknown'})")
    if found.devices or found.has_control or (found.is_wsl and found.smi):
        says = f"nvidia-smi says: {found.problem}" if found.smi else "there is neither /dev/nvidia0 nor nvidia-smi"
        return Choice("", f"NVIDIA's driver is here, but {says}; repair it, {_EITHER}")
    lists = "nvidia-smi lists no GPU" if found.smi else "there is no nvidia-smi"
    return Choice("cpu", f"/dev has no GPU of NVIDIA, and {lists}; for GPUs: make DEVICE=gpu install")


def main() -> int:
    choice = choose(look())
    if not choice.device:
        print(f"DEVICE: {choice.reason}", file=sys.stderr)
        return 1
    print(f"DEVICE is {choice.device}: {choice.reason}", file=sys.stderr)
    print(choice.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
