"""Chooses a container tool that works on this machine, and installs buildah if none does.

A program on PATH proves little: a docker client often has no daemon, and crun refuses hybrid cgroups.
"""

from __future__ import annotations

import os
import shutil
import sys

from rljob_cluster.host.cgroups import is_hybrid
from rljob_cluster.host.commands import try_run
from rljob_cluster.host.debian import install_missing
from rljob_cluster.images.base_image import ImageBuildError
from rljob_cluster.images.tools import Buildah, Docker, Tool

ENV_TOOL = "CONTAINER_TOOL"


def choose_tool() -> Tool:
    """CONTAINER_TOOL, else the first of buildah and docker that works, else a newly installed buildah."""
    requested = os.environ.get(ENV_TOOL, "")
    if requested not in ("", "buildah", "docker"):
        raise ImageBuildError(f"{ENV_TOOL}: must be buildah or docker, got {requested!r}; unset it to choose a tool")
    if requested == "docker":
        if not _works("docker"):
            raise ImageBuildError(f"{ENV_TOOL}: `docker info` fails; start docker's daemon, or unset {ENV_TOOL}")
        return _report(Docker(), f"{ENV_TOOL} requests it")
    if requested == "buildah":
        return _report(_prepare_buildah(), f"{ENV_TOOL} requests it")
    if _works("buildah"):
        return _report(_prepare_buildah(), "it is installed")
    if _works("docker"):
        return _report(Docker(), "its daemon answers, and buildah is not installed")
    reason = f"no tool worked before ({_describe('buildah')}, {_describe('docker')})"
    return _report(_prepare_buildah(), reason)


def _prepare_buildah() -> Buildah:
    install_missing(["buildah"])
    runtime = _choose_runtime()
    if not _works("buildah"):
        raise ImageBuildError("`buildah info` fails; run it to see why, or use a docker whose daemon answers")
    return Buildah(runtime)


def _choose_runtime() -> str | None:
    """None leaves the choice to buildah, which prefers crun."""
    if os.environ.get("BUILDAH_RUNTIME") or (shutil.which("crun") and not is_hybrid()):
        return None
    install_missing(["runc"])
    return "runc"


def _works(tool: str) -> bool:
    return try_run(tool, "info")


def _describe(tool: str) -> str:
    return f"`{tool} info` fails" if shutil.which(tool) else f"{tool} is not installed"


def _report(tool: Tool, reason: str) -> Tool:
    runtime = f" ({tool.runtime})" if isinstance(tool, Buildah) and tool.runtime else ""
    print(f"building images with {tool.name}{runtime}: {reason}", file=sys.stderr, flush=True)
    return tool
