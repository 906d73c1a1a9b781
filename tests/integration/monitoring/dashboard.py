"""The chart's dashboard as Grafana reads it: panels, their queries, and variables put in."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from tests.paths import ROOT

PATH = ROOT / "charts" / "rljob" / "dashboards" / "rljob.json"


class Query(NamedTuple):
    """One query of one panel."""

    panel: str
    legend: str
    expression: str


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PATH.read_text())
    return found


def list_panels() -> list[dict[str, Any]]:
    """All panels but the rows that group them."""
    return [panel for panel in read()["panels"] if panel["type"] != "row"]


def list_queries(panel: dict[str, Any], *, window: str, span: str, **variables: str) -> list[Query]:
    """A panel's queries, variables put in: those not named mean All."""
    values = {"__rate_interval": window, "__range": span, **dict.fromkeys(list_variables(), ".*"), **variables}

    def put_in(match: re.Match[str]) -> str:
        return values[match[1]]

    return [
        Query(panel["title"], target["legendFormat"], re.sub(r"\$(\w+)", put_in, target["expr"]))
        for target in panel["targets"]
    ]


def list_variables() -> dict[str, str]:
    """Name -> what Grafana asks for its values."""
    return {v["name"]: v["query"] for v in read()["templating"]["list"] if v["type"] == "query"}
