"""Write what an installation of the extras cpu and gpu needs: `python -m dev.requirements [--check]`.

The files are in the package rljob-inputs: the overrides of pyproject.toml, without which vLLM and torch do not resolve,
and for each extra the versions that uv.lock has, as constraints. Starts uv.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator

from dev.folders import ROOT
from rljob_api.generate.__main__ import write_files
from rljob_inputs.machine.installation import REQUIREMENTS

_EXPORT = (
    *("uv", "export", "--quiet", "--frozen", "--no-default-groups", "--no-emit-workspace", "--no-header"),
    *("--no-annotate", "--no-hashes", "--package", "rljob"),
)
_EXTRAS = ("--extra", "wandb", "--extra", "mlflow", "--extra", "trackio", "--extra", "tinker")
"""They may be added later, with the same files."""
_ENVIRONMENTS = " ; " + " or ".join(
    f"(platform_machine == '{machine}' and sys_platform == 'linux')" for machine in ("aarch64", "x86_64")
)
"""The marker of a package that all environments of the lock have."""


def render() -> Iterator[tuple[str, str]]:
    """Yield each file's name and text."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    header = "# Written by dev/requirements.py from {}. How to use it: docs/install.md\n"
    overrides = "".join(f"{line}\n" for line in settings["override-dependencies"])
    yield "overrides.txt", header.format("pyproject.toml") + overrides
    for extra in ("cpu", "gpu"):
        done = subprocess.run(
            [*_EXPORT, *_EXTRAS, "--extra", extra], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
        yield f"{extra}.txt", header.format("uv.lock") + done.stdout.replace(_ENVIRONMENTS, "")


def main(arguments: list[str]) -> int:
    REQUIREMENTS.mkdir(exist_ok=True)
    return write_files({REQUIREMENTS / name: text for name, text in render()}, check="--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
