"""The virtual environment with a function's requirements, created once for the same lines and the same Python.

It shares no packages with the server: a worker runs with its interpreter, and imports from RLJob and its plugins only
modules for workers, which use only the standard library. Owns the folder in the user's cache; a Pod's cache ends with
the Pod. Invariant: an incomplete environment is never used.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from rljob_api import foreign_texts
from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_api.wire.contract import ENV_INSTALLED_ONLY, ENV_TOKEN, MARK_INSTALLED, MARK_INSTALLS, NOT_INSTALLED
from rljob_service.pool.worker_packages import find_worker_packages

logger = logging.getLogger(__name__)

_COMPLETE = "rljob-complete"
_WORKER_FOLDER = "rljob-worker"
_NUM_LINES_SHOWN = 12
_INSTALLER_VARIABLES = (
    ("PIP_INDEX_URL", ("UV_DEFAULT_INDEX", "UV_INDEX_URL")),
    ("PIP_EXTRA_INDEX_URL", ("UV_INDEX", "UV_EXTRA_INDEX_URL")),
    ("PIP_FIND_LINKS", ("UV_FIND_LINKS",)),
    ("PIP_CERT", ("SSL_CERT_FILE",)),
)
"""pip's variable, which uv does not read, and uv's for the same setting (newest first)."""
_FILE_VARIABLES = ("UV_CONSTRAINT", "UV_EXCLUDE", "UV_OVERRIDE")
"""uv's variables that name files; their contents are part of the environment's digest."""


def is_own(python: str | None) -> bool:
    """Return whether this version, such as "3.12", is the server's, or None."""
    return python in (None, f"{sys.version_info.major}.{sys.version_info.minor}")


def ensure_environment(lines: Sequence[str], python_version: str | None = None) -> str:
    """Return the interpreter of an environment with these packages, creating it if needed. `python_version`: such as
    "3.12"; None: the server's.

    Raise UserError if this Python or the packages cannot be installed, TransientError if the index cannot be reached.
    """
    version = None if is_own(python_version) else python_version
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rljob" / "requirements"
    folder = root / _digest(lines, version)
    python = folder / "bin" / "python"
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another server of this machine may be creating it
        if not (folder / _COMPLETE).exists():
            if os.environ.get(ENV_INSTALLED_ONLY):
                _find_mistakes(lines, version)
                raise UserError(NOT_INSTALLED)
            what = f"{MARK_INSTALLS} the function's requirements{f' for Python {version}' if version else ''}"
            logger.info("uv %s: %s", what, ", ".join(lines) or "none")
            shutil.rmtree(folder, ignore_errors=True)
            _create(folder, python, lines, version)
            (folder / _COMPLETE).touch()
            logger.info(MARK_INSTALLED)
    return str(python)


def _digest(lines: Sequence[str], version: str | None = None) -> str:
    packages = {name: str(path) for name, path in find_worker_packages().items()}
    files = [os.environ.get(name, "").split() for name in _FILE_VARIABLES]
    contents = [[Path(file).read_text() if Path(file).is_file() else file for file in names] for names in files]
    own = [sys.version, sysconfig.get_platform(), sys.base_prefix]
    parts = [sorted(lines), *own, packages, contents, *([version] if version else [])]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def find_uv() -> str | None:
    """Return uv: of this program's own environment, else of the package `uv`, else on PATH."""
    own = Path(sys.executable).parent / "uv"
    if os.access(own, os.X_OK):
        return str(own)
    try:
        import uv
    except ImportError:
        return shutil.which("uv")
    return str(uv.find_uv_bin())


def _find_mistakes(lines: Sequence[str], version: str | None) -> None:
    """Raise UserError for lines that are no requirements, or whose package or version the index does not have. Knows
    nothing without uv or the index; downloads and builds no package."""
    if uv := find_uv():
        python = ["--python-version", version] if version else ["--python", sys.executable]
        command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-deps", "--no-build", *python, "-"]
        environment = _build_environment() | {"UV_HTTP_RETRIES": "0"}
        done = _call(command, environment, "\n".join(lines))
        if done.returncode != 0 and foreign_texts.WRONG_REQUIREMENT.search(done.stdout):
            raise _explain(done.stdout, lines)


def _create(folder: Path, python: Path, lines: Sequence[str], version: str | None) -> None:
    if (uv := find_uv()) is None:
        raise UserError(
            "function.requirements and python need uv, which is not here; install it, or add it to the image"
        )
    environment = _build_environment()
    if version:
        _create_with(version, folder, uv, environment)
    else:
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], environment, lines)
    if lines:
        requirements = folder / "requirements.txt"
        requirements.write_text("".join(f"{line}\n" for line in lines))
        install = [uv, "pip", "install", "--quiet", "--python", str(python), "--requirement", str(requirements)]
        _run(install, environment, lines)
    _link_worker(folder)


def _create_with(version: str, folder: Path, uv: str, environment: dict[str, str]) -> None:
    """Create an empty environment with another Python than the server's. uv installs it unless UV_PYTHON_DOWNLOADS is
    never."""
    downloads = {"UV_PYTHON_DOWNLOADS": os.environ.get("UV_PYTHON_DOWNLOADS", "automatic")}
    done = _call([uv, "venv", "--quiet", "--python", version, str(folder)], environment | downloads)
    if done.returncode != 0:
        raise UserError(
            f"python: there is no Python {version} here: {done.stdout.strip()}\ninstall it (`uv python install "
            f"{version}`); on a cluster set `image`, or defaults.pythonImages of the chart, to an image that has it"
        )


def _link_worker(folder: Path) -> None:
    """Let the environment's interpreter import the worker, and no other package of the server."""
    worker = folder / _WORKER_FOLDER
    worker.mkdir()
    for path in find_worker_packages().values():
        (worker / path.name).symlink_to(path)
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    (packages / f"{_WORKER_FOLDER}.pth").write_text(f"{worker}\n")


def _call(command: list[str], environment: dict[str, str], given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment,
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


def _run(command: list[str], environment: dict[str, str], lines: Sequence[str]) -> None:
    done = _call(command, environment)
    if done.returncode != 0:
        raise _explain(done.stdout, lines)


def _build_environment() -> dict[str, str]:
    """Return uv's environment, without the token: building a package runs its code."""
    environment = {"UV_PYTHON_DOWNLOADS": "never"} | dict(os.environ)
    environment.pop(ENV_TOKEN, None)
    for pip_name, uv_names in _INSTALLER_VARIABLES:
        if pip_name in environment and not any(name in environment for name in uv_names):
            environment[uv_names[0]] = environment[pip_name]
    return environment


def _explain(output: str, lines: Sequence[str]) -> RLJobError:
    text = "\n".join(line.rstrip() for line in output.strip().splitlines()[-_NUM_LINES_SHOWN:])
    what = f"function.requirements ({', '.join(lines)}) cannot be installed:\n{text}\n"
    if foreign_texts.UNREACHABLE_INDEX.search(output):
        return TransientError(
            f"{what}the package index cannot be reached; set UV_INDEX_URL in the reward's env, or build an image"
        )
    if foreign_texts.DISK_FULL.search(output):
        return TransientError(f"{what}the disk is full; give the Pod more ephemeral storage, or build an image")
    return UserError(f"{what}correct the lines, or build an image that has the packages (rewards[].image)")
