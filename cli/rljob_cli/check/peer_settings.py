"""The settings of other trainers, by the tables of docs/coming-from.md: for `rljob init --from`, and for fields of a
job that have a name of theirs.

The package has that page. tests/unit/test_docs.py and the packages of these trainers check its names.
"""

import re
from fnmatch import fnmatch
from importlib import resources
from operator import eq, itemgetter

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


def find_ours(path: str, *, is_exact: bool = False) -> tuple[str, str] | None:
    """Return our field for a path that ends with a name of another trainer, and its explanation. Of several, it is
    the one whose section is most like that of the path. Without `is_exact`, their name may have more words before."""
    *parents, name = path.removeprefix("spec.").split(".")
    word = _to_snake(name)
    # The first name of a cell is what the field means; others are what it is divided by.
    rows = [(peer, name_field(ours), cell, _list_names(cell)) for peer in _TABLES for ours, cell in read_table(peer)]
    for end in (rf"(.*\.|--)?{re.escape(word)}", rf".*_(?=.....){re.escape(word)}")[: 1 if is_exact else 2]:
        found = []
        for peer, ours, cell, names in rows:
            if names and re.fullmatch(end, theirs := names[0]):
                has_section = bool(parents) and parents[-1:] == theirs.split(".")[-2:-1]
                likeness = (count_common(path, ours) + has_section, theirs == word)
                shown = cell.replace("`", "") if re.search(r" [x/] |^[^`]|a share", cell) else theirs
                found.append((likeness, ours, f"{peer}'s {shown} is spec.{ours} here"))
        if found:
            likeness, ours, text = max(found, key=itemgetter(0))
            return (ours, text) if any(likeness) or not (is_exact or word in _COMMON_WORDS) else None
    return None


_COMMON_WORDS = {"id", "name", "path", "type"}
"""They mean something only with their section."""


def count_common(path: str, field: str) -> int:
    """Return how many sections of our field the path has, too."""
    return sum(map(eq, path.removeprefix("spec.").split("."), field.split(".")))


def explain_name(path: str) -> str:
    """Return what a path that ends with a name of another trainer is here; empty if none has it."""
    found = find_ours(path)
    return found[1] if found else find_without_counterpart(_to_snake(path.rpartition(".")[2])) or ""


def _to_snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _list_names(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)
