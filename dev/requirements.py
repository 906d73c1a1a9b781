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
from rljob_inputs.machine.installation import REQUIREMENTS

_EXPORT = (
    *("uv", "export", "--quiet", "--frozen", "--no-default-groups", "--no-emit-workspace", "--no-header"),
    *("--no-annotate", "--no-hashes", "--package", "rljob"),
)
_TRACKERS = ("--extra", "wandb", "--extra", "mlflow")
"""They may be added later, with the same files."""
_ENVIRONMENTS = " ; " + " or ".join(
    f"(platform_machine == '{machine}' and sys_platform == 'linux')" for machine in ("aarch64", "x86_64")
)
"""The marker of a package that all environments of the lock have."""


def render() -> Iterator[tuple[str, str]]:
    """Yield each file's name and text."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    header = "# Written by dev/requirements.py from {}. How to use it: docs/install-cli.md\n"
    overrides = "".join(f"{line}\n" for line in settings["override-dependencies"])
    yield "overrides.txt", header.format("pyproject.toml") + overrides
    for extra in ("cpu", "gpu"):
        done = subprocess.run(
            [*_EXPORT, *_TRACKERS, "--extra", extra], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
        yield f"{extra}.txt", header.format("uv.lock") + done.stdout.replace(_ENVIRONMENTS, "")


def main(arguments: list[str]) -> int:
    stale = []
    for name, text in render():
        path = REQUIREMENTS / name
        if "--check" not in arguments:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            stale.append(path.name)
    if stale:
        print(f"{REQUIREMENTS}: {', '.join(stale)} differ from uv.lock; run `make generate`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
