"""The rules that every type with a `source` has: its form, and what a cluster can resolve."""

from __future__ import annotations

from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.base import ClusterRule, Rule
from rljob_api.manifest.sources import parse_source

_SOURCE_CEL = "!self.source.contains('://') || self.source.matches('^(hf://[^/]+(/[^/]+)?/?|pvc://[^/]+(/.*)?)$')"


def _has_known_form(holder: Any) -> bool:
    try:
        parse_source(holder.source)
    except UserError:
        return False
    return True


SOURCE_FORM = Rule(
    ("source",), "must be hf://org/name, pvc://claim/path or a path", "correct the scheme", _has_known_form, _SOURCE_CEL
)
SOURCE_ON_A_CLUSTER = ClusterRule(
    "source",
    "must be hf://org/name, pvc://claim/path or an absolute path on a cluster; "
    "a path relative to the job file works with `rljob run` alone",
    "self.source.contains('://') || self.source.startsWith('/')",
)
