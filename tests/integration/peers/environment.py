"""verl and TRL as published, in a separate environment, and calls of their functions from a test.

Owns the environment in the user's cache and the process that runs in it. The environment has the two projects and what
verl's algorithms import beyond them; everything else, also torch, is what the lock file has installed.
Invariant: tensors go in and out, and no number of a peer is written down here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from rljob_service.pool.requirements import find_uv

PACKAGES = (
    "verl==0.9.1",
    "trl==1.16.0",
    "codetiming==1.4.0",
    "omegaconf==2.4.0",
    "orjson==3.13.0",
    "pyvers==0.2.3",
    "tensordict==0.15.3",
)
"""Without their dependencies: 35 MB."""
_PROGRAM = Path(__file__).with_name("program.py")
_COMPLETE = "rljob-complete"
_MAKES_UV = str(Path(__file__).parents[3] / ".tools" / "bin" / "uv")
"""Where the Makefile puts it on machines that have none."""


class Peers:
    """A process with the peers' packages. A peer is imported at its first call, which takes 10 to 20 s."""

    def __init__(self) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [ensure_environment(), "-W", "ignore", _PROGRAM],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def call(self, peer: str, function: str, **arguments: Any) -> Any:
        """Return what `function` of PEER_calls.py returns. `arguments`: tensors and plain values."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((peer, function, arguments), self._process.stdin)
        self._process.stdin.flush()
        result, failure = pickle.load(self._process.stdout)
        assert failure is None, f"{peer}, {function}: {failure}"
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def ensure_environment() -> str:
    """Return the interpreter of the peers' environment, created once for these packages and this installation."""
    shared = sysconfig.get_path("purelib")
    digest = hashlib.sha256(repr((PACKAGES, sys.version, shared)).encode()).hexdigest()[:32]
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rljob" / "peers"
    folder = root / digest
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be creating it
        if not (folder / _COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            _create(folder, shared)
            (folder / _COMPLETE).touch()
    return str(folder / "bin" / "python")


def _create(folder: Path, shared: str) -> None:
    uv = find_uv() or _MAKES_UV
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([uv, "pip", "install", "--quiet", "--no-deps", "--python", python, *PACKAGES], check=True)
    packages = folder / Path(shared).relative_to(sys.prefix)
    (packages / "shared.pth").write_text(f"{shared}\n")
