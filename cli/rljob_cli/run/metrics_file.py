"""metrics.jsonl as the driver writes it: one JSON object per step and evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Return the complete rows. The driver may be writing the last line, which is then left for the next read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def split_rows(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of steps, and those of evaluations."""
    steps = [row for row in rows if row.get("type", "step") == "step"]
    return steps, [row for row in rows if row.get("type") == "eval"]
