"""Builds the images of a commit, and pushes images and the chart to a registry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def build_images(tree: Path, names: Sequence[str], commit: str) -> list[dict[str, Any]]:
    """Build images from a tree by its own code. Their base is one digest, which their labels name."""
    environment = os.environ | {"PYTHONPATH": str(tree / "cluster"), "RLJOB_REVISION": commit}
    command = [sys.executable, "-m", "rljob_cluster.images", "--pin-base", "--output", "json", *names]
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [{name: each[name] for name in ("image", "base", "tool")} for each in json.loads(done.stdout)]


def push_image(image: dict[str, Any], registry: str, insecure: bool) -> str:
    """Push an image to REGISTRY/NAME:TAG; return its digest there."""
    target = f"{registry}/{image['image']}"
    if image["tool"] == "buildah":
        return _push_by_buildah(image["image"], target, insecure)
    subprocess.run(["docker", "tag", image["image"], target], check=True)
    subprocess.run(["docker", "push", "--quiet", target], stdout=sys.stderr, check=True)
    command = ["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", target]
    digests = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return next(str(each.partition("@")[2]) for each in digests if each.startswith(target.rpartition(":")[0]))


def _push_by_buildah(image: str, target: str, insecure: bool) -> str:
    read, write = os.pipe()
    command = ["buildah", "push", "--quiet", "--digestfile", f"/dev/fd/{write}", f"--tls-verify={not insecure}".lower()]
    with os.fdopen(read) as digest:
        subprocess.run([*command, image, f"docker://{target}"], pass_fds=(write,), check=True)
        os.close(write)
        return digest.read().strip()


def push_chart(helm: Path, chart: Path, registry: str, insecure: bool) -> str:
    """Push the chart to REGISTRY/charts/rljob; return its digest there."""
    options = ["--plain-http"] if insecure else []
    command = [str(helm), "push", str(chart), f"oci://{registry}/charts", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return next(line.partition(": ")[2].strip() for line in done.stdout.splitlines() if line.startswith("Digest: "))
