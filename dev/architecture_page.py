"""The table of architectures in docs/models-and-data.md. Needs neither transformers nor vLLM."""

from __future__ import annotations

from itertools import groupby

from rljob_inputs.models.architectures import Architecture, Table

BEGIN, END = "<!-- architectures: `make generate` -->", "<!-- end of architectures -->"
_ADAPTERS = {"any": "yes", "gpu": "with GPUs", "none": "merged"}
_CPUS = {"any": "yes", "bfloat16": "bfloat16 alone", "none": "no"}


def replace(page: str, table: Table) -> str:
    """Return the page with today's table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{render(table)}\n{END}{after}"


def render(table: Table) -> str:
    rows = sorted(table.by_name.values(), key=lambda row: row.name)
    tested = [row for row in rows if row.is_tested and not row.obstacle]
    others = [row for row in rows if not row.is_tested and not row.obstacle]
    lines = [
        "| tested architecture | kind | tested with | rollouts on CPUs | adapters in rollouts |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row.name}` | {', '.join(row.kinds)} | {', '.join(row.tested_with)} "
        f"| {_CPUS[row.on_cpus]} | {_ADAPTERS[row.adapters]} |"
        for row in tested
    ]
    lines += ["", f"| not tested, and expected to train ({len(others)}) |", "|---|", f"| {_list(others)} |", ""]
    lines += ["| not trained | reason |", "|---|---|"]
    refused = sorted((row for row in rows if row.obstacle), key=lambda row: row.obstacle.partition(" (")[0])
    for reason, group in groupby(refused, key=lambda row: row.obstacle.partition(" (")[0]):
        lines.append(f"| {_list(list(group))} | {reason} |")
    return "\n".join(lines)


def _list(rows: list[Architecture]) -> str:
    return ", ".join(f"`{row.name}`" for row in rows)
