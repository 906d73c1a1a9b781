"""Runs the demo with several seeds, to check that held-out accuracy rises every time.

Uses `rljob run` and reads summary.json. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from run_job import QUICKSTART, measure_job

ROOT = Path(__file__).parents[1]


def run_seed(seed: int, folder: Path) -> dict[str, Any]:
    """Run the demo with `seed`. Raise CalledProcessError if it fails."""
    found = measure_job(QUICKSTART, folder / f"seed-{seed}", {"schedule.seed": seed})
    means = (("before", found.before), ("after", found.after))
    accuracies = {f"{name}_{when}": by_name[name] for name in ("exact", "last") for when, by_name in means}
    gain = found.after["exact"] - found.before["exact"]
    return {"seed": seed, "seconds": found.seconds, **accuracies, "gain": gain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dir", type=Path, default=ROOT / "runs/bench-seeds")
    arguments = parser.parse_args()
    rows = [run_seed(seed, arguments.dir) for seed in arguments.seeds]
    table = Table(*rows[0], title="Held-out accuracy of the quickstart, greedy")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    print(json.dumps({"min_gain": min(row["gain"] for row in rows), "seeds": rows}))


if __name__ == "__main__":
    main()
