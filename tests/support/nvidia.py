"""A machine with NVIDIA's GPUs: device files below a folder, and a program nvidia-smi."""

from __future__ import annotations

from pathlib import Path

DRIVER_TEXT = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root@host)\n"


def write_files(root: Path, *names: str, driver: str | None = None) -> None:
    """Write device files, and the driver's version."""
    for name in names:
        (root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "dev" / name).touch()
    if driver:
        path = root / "proc/driver/nvidia/version"
        path.parent.mkdir(parents=True)
        path.write_text(DRIVER_TEXT.format(driver))


def write_smi(path: Path, *gpus: str, knows_capability: bool = True, problem: str = "") -> Path:
    """Write a program that lists `gpus`: lines of index, UUID, driver, MiB, name and capability."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = (
        ""
        if knows_capability
        else 'case "$1" in *compute_cap*) echo "Field \\"compute_cap\\" is not valid"; exit 2;; esac'
    )
    text = "\n".join(gpus) if knows_capability else "\n".join(gpu.rpartition(",")[0] for gpu in gpus)
    end = f"echo '{problem}' >&2; exit 9" if problem else f"cat <<'END'\n{text}\nEND"
    path.write_text(f"#!/bin/sh\n{cut}\n{end}\n")
    path.chmod(0o755)
    return path
