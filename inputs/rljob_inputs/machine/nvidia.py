"""The NVIDIA GPUs that this machine shows: device files, and what nvidia-smi prints.

Needs the standard library alone, and no newer Python than a system has: `make install` calls it before anything is
installed (dev/device.py). Needs neither torch nor NVML: it also
explains why these find no GPU. Leaves to its callers which GPUs a user may use.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_SMI_OF_WSL = "usr/lib/wsl/lib/nvidia-smi"
"""Windows brings it, often not on the PATH."""
_WSL_DEVICE = "dev/dxg"
"""The only device file of GPUs under WSL2, for those of any vendor."""
_DRIVER_FILE = "proc/driver/nvidia/version"
# Here, and not in rljob_api.foreign_texts: the installation runs this file before any package is there.
_DRIVER = re.compile(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", re.MULTILINE)
_FIELDS = "index,uuid,driver_version,memory.total,name"
_CAPABILITY = ",compute_cap"
"""Drivers before 510 do not know this field."""
_TIMEOUT_SECONDS = 60
"""The first call after a boot may initialize each GPU for seconds."""
_MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    index: str
    uuid: str
    name: str
    memory_bytes: int
    """0: unknown, as of a GPU that shares the host's memory."""
    driver: str
    """Version of the driver, such as 580.65.06."""
    capability: float | None = None
    """CUDA's compute capability, such as 8.6. None: the driver does not tell it."""


@dataclass(frozen=True)
class Nvidia:
    """What a machine shows of NVIDIA's GPUs."""

    devices: tuple[str, ...] = ()
    """Indices of /dev/nvidia0 and so on. WSL2 has none."""
    driver: str | None = None
    """Version of the kernel module. None: there is none, or the machine is WSL2."""
    has_control: bool = False
    """Whether /dev/nvidiactl exists."""
    is_wsl: bool = False
    smi: str | None = None
    """Path of nvidia-smi."""
    gpus: tuple[Gpu, ...] = ()
    """As nvidia-smi lists them."""
    problem: str = ""
    """What nvidia-smi says in place of a list."""


def find_devices(root: Path = Path("/")) -> list[str]:
    """Return the indices of the device files, in order."""
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in (root / "dev").glob("nvidia*"))
    return sorted((match[1] for match in names if match), key=int)


def list_wsl_gpus(root: Path = Path("/")) -> list[str]:
    """Return the indices of the GPUs under WSL2; elsewhere, none."""
    return [gpu.index for gpu in look(root).gpus] if (root / _WSL_DEVICE).exists() else []


def read_driver_version(root: Path = Path("/")) -> str | None:
    """Return the version, such as 580.65.06; None without a driver. Under WSL2 it is that of Windows, which only
    nvidia-smi knows."""
    version = _read_driver(root / _DRIVER_FILE)
    if version is None and (root / _WSL_DEVICE).exists():
        return next((gpu.driver for gpu in look(root).gpus), None)
    return version


def look(root: Path = Path("/"), path: str | None = None) -> Nvidia:
    """Return what the machine shows. Starts nvidia-smi if there is one. `path`: where to look for it, as $PATH."""
    of_wsl = str(root / _SMI_OF_WSL)
    smi = shutil.which("nvidia-smi", path=path) or (of_wsl if os.access(of_wsl, os.X_OK) else None)
    gpus, problem = _list_gpus(smi) if smi else ((), "")
    return Nvidia(
        devices=tuple(find_devices(root)),
        driver=_read_driver(root / _DRIVER_FILE),
        has_control=(root / "dev/nvidiactl").exists(),
        is_wsl=(root / _WSL_DEVICE).exists(),
        smi=smi,
        gpus=gpus,
        problem=problem,
    )


def _read_driver(path: Path) -> str | None:
    try:
        found = _DRIVER.search(path.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _list_gpus(smi: str) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs, or the problem."""
    code, text = _query(smi, _FIELDS + _CAPABILITY)
    if code != 0 and "compute_cap" in text:
        code, text = _query(smi, _FIELDS)
    gpus = parse_list(text) if code == 0 else ()
    return gpus, "" if gpus else next(iter(text.strip().splitlines()), f"it ended with exit code {code}")


def _query(smi: str, fields: str) -> tuple[int, str]:
    command = [smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


def parse_list(text: str) -> tuple[Gpu, ...]:
    """Read the lines of --query-gpu; others are left out. Pure."""
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    return tuple(
        Gpu(row[0], row[1], row[4], int(row[3]) * _MIB if row[3].isdigit() else 0, row[2], _to_capability(row[5:]))
        for row in rows
        if len(row) >= 5 and row[0].isdigit()
    )


def _to_capability(values: list[str]) -> float | None:
    return float(values[0]) if values and re.fullmatch(r"\d+\.\d+", values[0]) else None
