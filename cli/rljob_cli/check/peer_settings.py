"""The settings of other trainers, by the tables of docs/coming-from.md: for `rljob init --from`, and for fields of a
job that have a name of theirs.

The package has that page. tests/unit/test_docs.py and the packages of these trainers check its names.
"""

import re
from fnmatch import fnmatch
from importlib import resources

_PAGE = (resources.files("rljob_cli.check") / "coming-from.md").read_text()
_TABLES = {
    "verl": ("## Settings\n", 2),
    "TRL": ("## Settings\n", 3),
    "OpenRLHF": ("## Settings\n", 4),
    "slime": ("## Settings of slime", 2),
    "prime-rl": ("## Settings of slime", 3),
}
"""By trainer: the heading and the column."""


def read_table(peer: str) -> list[tuple[str, str]]:
    """Return the cells of the table of settings: ours, and the trainer's."""
    heading, column = _TABLES[peer]
    rows = re.findall(r"^\| `.*", _PAGE.partition(heading)[2].partition("\n## ")[0], re.M)
    return [(cells[1].strip(), cells[column].strip()) for cells in (row.split("|") for row in rows)]


def name_field(ours: str) -> str:
    """Return the field of the first cell of a row."""
    return re.split("[`:]", ours)[1]


def find_without_counterpart(name: str) -> str | None:
    """Return what the page says of a setting that has no counterpart here."""
    table = re.findall(r"^\| (.*`) \| (.*) \|$", _PAGE.partition("## Settings without a counterpart")[2], re.M)
    return next((why for theirs, why in table if any(fnmatch(name, each) for each in _list_names(theirs))), None)


def explain_name(name: str) -> str:
    """Return what a name of another trainer is here, which may begin with more words; empty if none has it. `name`:
    the last part of a path."""
    word = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    # The first name of a cell is what the field means; others are what it is divided by.
    rows = [(peer, ours, _list_names(cell)) for peer in _TABLES for ours, cell in read_table(peer)]
    for end in (rf"(.*\.|--)?{re.escape(word)}", rf".*_(?=.....){re.escape(word)}"):
        for peer, ours, names in rows:
            if names and re.fullmatch(end, names[0]):
                return f"{peer}'s {names[0]} is spec.{name_field(ours)} here"
    return find_without_counterpart(word) or ""


def _list_names(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)
