"""What the checks found, as a table or as JSON. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "warning", "failed"]
_NAMES: dict[State, str] = {"ok": "ok", "warning": "WARNING", "failed": "FAILED"}


@dataclass(frozen=True)
class Check:
    name: str
    """What was checked."""
    state: State
    found: str
    remedy: str = ""
    """What to do; empty if nothing."""


def has_failed(checks: Sequence[Check]) -> bool:
    return any(check.state == "failed" for check in checks)


def format_table(checks: Sequence[Check]) -> str:
    """Return a line per check. What to do follows in a separate line."""
    widths = [max(len(check.name) for check in checks), max(map(len, _NAMES.values()))]
    lines = []
    for check in checks:
        lines.append(f"{check.name:{widths[0]}}  {_NAMES[check.state]:{widths[1]}}  {check.found}".rstrip())
        if check.remedy:
            lines.append(f"{'':{sum(widths) + 4}}-> {check.remedy}")
    num_failed = sum(check.state == "failed" for check in checks)
    lines.append(f"{num_failed} of {len(checks)} checks failed" if num_failed else f"all {len(checks)} checks passed")
    return "\n".join(lines)


def format_json(checks: Sequence[Check]) -> str:
    document = {"ok": not has_failed(checks), "checks": [asdict(check) for check in checks]}
    return json.dumps(document, indent=2)
