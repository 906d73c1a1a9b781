"""The labels of an image by which its origin is known: names of the OCI image specification."""

import os
import subprocess
from pathlib import Path

_PREFIX = "org.opencontainers.image."
ENV_REVISION = "RLJOB_REVISION"


def build_labels(name: str, tag: str, revision: str | None, base: str, digest: str | None) -> dict[str, str]:
    """Return labels. What is not known is left out: the commit outside of a repository, the digest of a local base."""
    found = {
        "title": f"rljob/{name}",
        "version": tag,
        "revision": revision,
        "licenses": "Apache-2.0",
        "vendor": "RLJob authors",
        "base.name": base.partition("@")[0],
        "base.digest": digest,
    }
    return {f"{_PREFIX}{key}": value for key, value in found.items() if value}


def find_revision(root: Path) -> str | None:
    """Return the commit that a tree is built from: RLJOB_REVISION, else git's, with -dirty if files differ from it."""
    if given := os.environ.get(ENV_REVISION):
        return given
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
