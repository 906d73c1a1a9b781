"""Where a model or a data set comes from: the four forms of `source`, and what each is inside a container."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rljob_api.errors import UserError
from rljob_api.wire.contract import PATH_CLAIMS


@dataclass(frozen=True)
class Source:
    """One parsed source. `claim` is set for pvc alone; `path` is the repository's id for hf."""

    kind: Literal["hf", "pvc", "absolute", "relative"]
    path: str
    claim: str = ""

    @property
    def container_path(self) -> str:
        """The path that a container opens, or hf://org/name."""
        if self.kind == "hf":
            return f"hf://{self.path}"
        if self.kind == "pvc":
            return f"{PATH_CLAIMS}/{self.claim}/{self.path}".rstrip("/")
        return self.path


def parse_source(source: str) -> Source:
    """Parse a source. Raises UserError for an unknown scheme or a missing part."""
    scheme, separator, rest = source.partition("://")
    if not separator:
        return Source("absolute" if source.startswith("/") else "relative", source)
    if scheme == "hf" and rest.count("/") <= 1 and rest.strip("/"):
        return Source("hf", rest)
    if scheme == "pvc" and rest.partition("/")[0]:
        claim, _, path = rest.partition("/")
        return Source("pvc", path, claim)
    raise UserError(f"must be hf://org/name, pvc://claim/path or a path, got {source}")
