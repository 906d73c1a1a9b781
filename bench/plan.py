"""The plan of `rljob plan` against what torch finds: the parts of a trainer rank, for shapes from 0.135B to 32B.

The policy's own update runs on fake tensors under torch's memory tracker, so neither GPUs nor memory are needed. With
--resident, a real rank of SmolLM2-135M on CPUs runs two updates in addition, and the peak of its process is compared.
Prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import Any

from memory_plan.cases import ALL_CASES, Case
from memory_plan.resident import measure_resident
from memory_plan.tracker import Parts, planned, track, track_on_accelerator
from rich.console import Console
from rich.table import Table

_GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="only cases whose name contains this text")
    parser.add_argument("--resident", action="store_true", help="also measure real processes (4 GB of memory)")
    options = parser.parse_args()
    console = Console(width=150)
    table = Table("trainer rank, bytes in GiB", *Parts.__annotations__, "largest error", title="tracked / planned")
    found: list[dict[str, Any]] = []
    for case in (case for case in ALL_CASES if (options.case or "") in case.name):
        started = time.monotonic()
        result = compare(case)
        console.print(f"{case.name}: {100 * result['error']:.1f}% in {time.monotonic() - started:.0f} s")
        found.append(result)
        pairs = [(result["tracked"][part], result["planned"][part]) for part in result["planned"]]
        cells = [f"{tracked / _GIB:.2f} / {plan / _GIB:.2f}" if tracked or plan else "-" for tracked, plan in pairs]
        table.add_row(case.name, *cells, f"{100 * result['error']:.1f}%")
    console.print(table)
    resident = measure_resident(console) if options.resident else []
    print(json.dumps({"bench": "plan", "cases": found, "resident": resident}))


def compare(case: Case) -> dict[str, Any]:
    """Return both, and the largest error of a part, relative to what the tracker finds in it."""
    tracked = asdict(track_on_accelerator(case) if case.on_accelerator else track(case))
    plan = asdict(planned(case))
    errors = {part: abs(plan[part] - tracked[part]) / tracked[part] for part in plan if tracked[part]}
    return {"case": case.name, "tracked": tracked, "planned": plan, "errors": errors, "error": max(errors.values())}


if __name__ == "__main__":
    main()
