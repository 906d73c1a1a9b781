"""The `source` of a model or a dataset: its four forms, their paths in a container, and the rules that validate it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rljob_api.errors import UserError
from rljob_api.manifest.base import ClusterRule, PathText, Rule, ShortText, Spec
from rljob_api.wire.contract import PATH_CLAIMS

_SOURCE_CEL = "!self.source.contains('://') || self.source.matches('^(hf://[^/]+(/[^/]+)?/?|pvc://[^/]+(/.*)?)$')"


@dataclass(frozen=True)
class Source:
    kind: Literal["hf", "pvc", "absolute", "relative"]
    path: str
    """For hf the repository's id."""
    claim: str = ""
    """Set for pvc only."""

    @property
    def container_path(self) -> str:
        """The path that a container opens, or hf://org/name."""
        if self.kind == "hf":
            return f"hf://{self.path}"
        if self.kind == "pvc":
            return f"{PATH_CLAIMS}/{self.claim}/{self.path}".rstrip("/")
        return self.path


def parse_source(source: str) -> Source:
    """Parse a source. Raises UserError if the scheme is unknown or a part is missing."""
    scheme, separator, rest = source.partition("://")
    if not separator:
        return Source("absolute" if source.startswith("/") else "relative", source)
    if scheme == "hf" and rest.count("/") <= 1 and rest.strip("/"):
        return Source("hf", rest)
    if scheme == "pvc" and rest.partition("/")[0]:
        claim, _, path = rest.partition("/")
        return Source("pvc", path, claim)
    raise UserError(f"must be hf://org/name, pvc://claim/path or a path, got {source}")


def _is_valid(holder: Any) -> bool:
    try:
        parse_source(holder.source)
    except UserError:
        return False
    return True


class HasSource(Spec):
    """A type with a `source`, which subclasses declare and describe."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("source",),
            "must be hf://org/name, pvc://claim/path or a path",
            "correct the scheme",
            _is_valid,
            _SOURCE_CEL,
        ),
    )
    CLUSTER_RULES: ClassVar[tuple[ClusterRule, ...]] = (
        ClusterRule(
            "source",
            "must be hf://org/name, pvc://claim/path or an absolute path on a cluster; "
            "relative paths work only with `rljob run`",
            "self.source.contains('://') || self.source.startsWith('/')",
        ),
    )


class ModelSource(HasSource):
    """A checkpoint in Hugging Face format."""

    source: PathText
    """A Hugging Face folder: `hf://org/name`, `pvc://claim/path`, `/path`, or a path relative to the job file
    (`./path`, `../path`; `rljob run` only)."""
    revision: ShortText | None = None
    """Branch, tag or commit of an hf:// source."""
    trust_remote_code: bool = False
    """Whether to run code that comes with the model."""
