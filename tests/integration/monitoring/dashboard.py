"""The chart's dashboard as Grafana reads it: panels, and their queries with variables replaced."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NamedTuple

from tests.paths import ROOT

DIGEST = "dashboard"
"""Name of the digest in the metadata of the picture."""
PICTURE = ROOT / "docs" / "images" / "dashboard.png"
PATH = ROOT / "charts" / "rljob" / "dashboards" / "rljob.json"


class Query(NamedTuple):
    """One query in a panel."""

    panel: str
    legend: str
    expression: str


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PATH.read_text())
    return found


def list_all() -> list[dict[str, Any]]:
    """Return rows, each before its panels: Grafana keeps those of a folded row in the row."""
    return [each for panel in read()["panels"] for each in (panel, *panel.get("panels", ()))]


def list_panels() -> list[dict[str, Any]]:
    """Return all panels except rows."""
    return [panel for panel in list_all() if panel["type"] != "row"]


def digest() -> str:
    """Return what a picture of the dashboard has in its metadata: it changes with any title or query."""
    shown = [[panel["title"], [target["expr"] for target in panel.get("targets", ())]] for panel in list_all()]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def list_queries(panel: dict[str, Any], *, window: str, span: str, **variables: str) -> list[Query]:
    """Return a panel's queries with variables replaced. Variables that are not given mean All."""
    values = {"__rate_interval": window, "__range": span, **dict.fromkeys(list_variables(), ".*"), **variables}

    def replace(match: re.Match[str]) -> str:
        return values[match[1]]

    return [
        Query(panel["title"], target["legendFormat"], re.sub(r"\$(\w+)", replace, target["expr"]))
        for target in panel["targets"]
    ]


def list_annotations() -> list[str]:
    """Return their queries, for all jobs."""
    return [re.sub(r"\$\w+", ".*", each["expr"]) for each in read()["annotations"]["list"]]


def list_variables() -> dict[str, str]:
    """Return name -> Grafana's query for the values."""
    return {v["name"]: v["query"] for v in read()["templating"]["list"] if v["type"] == "query"}
