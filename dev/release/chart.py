"""What the packaged chart says beyond that of the repository: its commit, where its images are, and on which nodes they
run. Pure."""

from __future__ import annotations

import re


def describe(name: str, text: str, commit: str, registry: str | None, architectures: str = "") -> str:
    """Return a file of the chart with its commit, and with the names of the images in the registry. Its operator and
    its jobs select the architecture of the images, if that is only one.

    helm copies annotations of Chart.yaml to the artifact, so that `org.opencontainers.image.revision` can be read
    without pulling it.
    """
    if registry:
        text = re.sub(r"(?<![/\w])rljob/(?=(?:operator|trainer|reward(?:-py\d+)?)\b)", f"{registry}/rljob/", text)
    if architectures and "," not in architectures:
        selected = rf"\g<0>, \1kubernetes.io/arch\1: \1{architectures}\1"
        text = re.sub(r'("?)kubernetes\.io/os\1: \1linux\1', selected, text)
    if name == "Chart.yaml":
        assert "\nannotations:\n" in text, "the chart has annotations"
        text = text.replace("\nannotations:\n", f"\nannotations:\n  org.opencontainers.image.revision: {commit}\n", 1)
    return text
