"""`python -m rljob_api.generate [--check]`: write the CRDs (crds/ and the Helm chart) and tables of the documentation.

docs/monitoring.md and docs/runs.md have tables between comments. `dev/on_change.py` writes docs/reference.md.

Invariant: the files in git equal the output; `--check` (make verify) fails on drift and writes nothing.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from rljob_api.generate.crd import KINDS, build_chart_template, build_crd, build_manifest
from rljob_api.generate.reference import build_column_table, build_evaluation_table, build_step_table

_ROOT = Path(__file__).resolve().parents[3]


def build_files() -> dict[str, str]:
    """Return path in the repository -> content of all generated files."""
    files = dict[str, str]()
    for model in KINDS:
        crd = build_crd(model)
        name = f"{crd['metadata']['name']}.yaml"
        files[f"crds/{name}"] = build_manifest(crd)
        files[f"charts/rljob/templates/crds/{name}"] = build_chart_template(crd)
    tables = {"step": build_step_table(), "evaluation": build_evaluation_table()}
    for name, own in (("docs/monitoring.md", tables), ("docs/runs.md", {"columns": build_column_table()})):
        files[name] = (_ROOT / name).read_text("utf-8")
        for mark, table in own.items():
            files[name] = replace_table(files[name], mark, table)
    return files


def replace_table(text: str, mark: str, table: str) -> str:
    """Return the page with the table between `<!-- generated: MARK` and `<!-- end: MARK`. Raise ValueError if it has
    not both comments."""
    begin, end = f"<!-- generated: {mark}", f"<!-- end: {mark}"
    before, _, rest = text.partition(begin)
    first_line, newline, body = rest.partition("\n")
    _, found, after = body.partition(end)
    if not found:
        raise ValueError(f"the page needs the comments `{begin} ... -->` and `{end} -->`")
    return f"{before}{begin}{first_line}{newline}{table}{end}{after}"


def main(arguments: list[str]) -> int:
    files = {_ROOT / name: text for name, text in build_files().items()}
    return write_files(files, check="--check" in arguments)


def write_files(files: Mapping[Path, str], *, check: bool) -> int:
    """Write the files that differ; `check`: only name them. Return the exit code."""
    stale = [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if check:
            print(f"{path} is out of date; run `make generate`", file=sys.stderr)
        else:
            path.write_text(files[path], "utf-8")
            print(f"wrote {path}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
