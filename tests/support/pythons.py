"""Other Pythons than that of the tests, where this machine has them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


def require_python(version: str) -> dict[str, str]:
    """Return variables with which programs find this Python, such as "3.12", or skip the test."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    folders = [None, *sorted(pyenv.glob(f"{version}*/bin"))]
    for folder in folders:
        path = os.pathsep.join([*([str(folder)] if folder else []), os.environ["PATH"]])
        try:
            done = subprocess.run(
                [f"python{version}", "--version"], env={**os.environ, "PATH": path}, capture_output=True
            )
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            return {"PATH": path}
    pytest.skip(f"there is no Python {version} on this machine: uv python install {version}")
