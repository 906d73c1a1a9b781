"""The `source` of a model or a dataset: its four forms, their paths in a container, and the rules that validate it; and
the Hub that hf:// sources come from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rljob_api.errors import UserError
from rljob_api.manifest.base import ClusterRule, ObjectName, PathText, Rule, ShortText, Spec, Url
from rljob_api.wire.contract import PATH_CLAIMS

_REPOSITORY = re.compile(r"[^/]+(/[^/]+)?/?")
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
    if scheme == "hf" and _REPOSITORY.fullmatch(rest):
        return Source("hf", rest.removesuffix("/"))
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


class SecretKeyRef(Spec):
    """A key of a Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: ObjectName
    """Key in the Secret. `rljob run` reads the environment variable of this name instead."""


class Hub(Spec):
    """The Hugging Face Hub that hf:// sources come from. The head, trainers, rollouts and vLLM in reward Pods use it;
    reward functions do not."""

    endpoint: Url | None = None
    """Address of a mirror, set as HF_ENDPOINT. Null: HF_ENDPOINT in a role's env (or the shell of `rljob run`), else
    https://huggingface.co."""
    token_secret_ref: SecretKeyRef | None = None
    """Access token for gated and private repositories, set as HF_TOKEN. Null: HF_TOKEN in a role's env (or the shell of
    `rljob run`), else none."""
