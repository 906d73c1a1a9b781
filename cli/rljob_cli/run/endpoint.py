"""Where the head of a run in progress answers, in a file of its folder: how `rljob ui` finds it on this machine.

Invariants: only the user who runs the job can read the file, which has the job's token; it exists while the run does. A
run that was killed leaves it, with the token of a head that is gone.
"""

import json
from pathlib import Path
from typing import NamedTuple

from rljob_cli.local.node.volumes import write_atomically

_FILE = ".head.json"


class Endpoint(NamedTuple):
    url: str
    token: str


def write_endpoint(folder: Path, endpoint: Endpoint) -> None:
    write_atomically(folder / _FILE, json.dumps(endpoint._asdict()).encode(), 0o600)


def read_endpoint(folder: Path) -> Endpoint | None:
    """Return None if there is no head, or it is not this user's."""
    try:
        found = json.loads((folder / _FILE).read_text())
        return Endpoint(str(found["url"]), str(found["token"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def remove_endpoint(folder: Path) -> None:
    (folder / _FILE).unlink(missing_ok=True)
