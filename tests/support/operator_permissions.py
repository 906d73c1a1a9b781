"""The table of permissions in rljob_operator.kube, with which the chart's roles are compared."""

from __future__ import annotations

import re

import yaml

from rljob_operator import kube
from tests.paths import ROOT

FEATURES = sorted(yaml.safe_load((ROOT / "charts" / "rljob" / "values.yaml").read_text())["features"])
"""Values of the chart that grant more."""


def read_table(*features: str) -> set[tuple[str, str, str]]:
    """Return {(group, resource, verb)} with the rows of these features."""
    granted = set()
    for line in (kube.__doc__ or "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or cells[0] == "group":
            continue
        feature = re.search(r"\(features\.(\w+)\)", cells[2])
        if feature is None or feature[1] in features:
            verbs = cells[2].split("(")[0].split()
            granted |= {(cells[0].strip('"'), resource, v) for resource in re.split("[ ,]+", cells[1]) for v in verbs}
    assert len(granted) > 50, "the table was not read"
    return granted
