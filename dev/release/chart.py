"""What the packaged chart says beyond that of the repository: its commit, and where its images are. Pure."""

from __future__ import annotations

import re


def describe(name: str, text: str, commit: str, registry: str | None) -> str:
    """Return a file of the chart with its commit, and with the names of the images in the registry.

    helm copies annotations of Chart.yaml to the artifact, so that `org.opencontainers.image.revision` can be read
    without pulling it.
    """
    if registry:
        text = re.sub(r"(?<![/\w])rljob/(?=(?:operator|trainer|reward(?:-py\d+)?)\b)", f"{registry}/rljob/", text)
    if name == "Chart.yaml":
        assert "\nannotations:\n" in text, "the chart has annotations"
        text = text.replace("\nannotations:\n", f"\nannotations:\n  org.opencontainers.image.revision: {commit}\n", 1)
    return text
