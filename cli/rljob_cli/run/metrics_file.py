"""metrics.jsonl as the driver writes it: one JSON object per step and evaluation."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Return the complete rows. The driver may be writing the last line, which is then left for the next read."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def split_rows(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    steps = [row for row in rows if row.get("type", "step") == "step"]
    return steps, [row for row in rows if row.get("type") == "eval"]
