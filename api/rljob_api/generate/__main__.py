"""`python -m rljob_api.generate [--check]`: write the CRDs (crds/ and the Helm chart) and tables of the documentation.

docs/reference.md is generated as a whole; docs/monitoring.md and docs/trajectories.md have tables between comments.

Invariant: the files in git equal the output; `--check` (make verify) fails on drift and writes nothing.
"""

import argparse
import sys
from pathlib import Path

from rljob_api.generate.crd import KINDS, build_chart_template, build_crd, build_manifest, build_object_schema
from rljob_api.generate.records import build_column_table, build_evaluation_table, build_step_table
from rljob_api.generate.reference import build_reference

_ROOT = Path(__file__).resolve().parents[3]


def build_files() -> dict[str, str]:
    """Return path in the repository -> content of all generated files."""
    files = {"docs/reference.md": build_reference(*map(build_object_schema, KINDS))}
    for model in KINDS:
        crd = build_crd(model)
        name = f"{crd['metadata']['name']}.yaml"
        files[f"crds/{name}"] = build_manifest(crd)
        files[f"charts/rljob/templates/crds/{name}"] = build_chart_template(crd)
    tables = {"step": build_step_table(), "evaluation": build_evaluation_table()}
    for name, own in (("docs/monitoring.md", tables), ("docs/trajectories.md", {"columns": build_column_table()})):
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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m rljob_api.generate", description="Write crds/ and the generated parts of docs/."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check = parser.parse_args(argv).check
    num_stale = 0
    for name, text in build_files().items():
        path = _ROOT / name
        if path.exists() and path.read_text("utf-8") == text:
            continue
        num_stale += 1
        if check:
            print(f"{name} is out of date; run `make generate`", file=sys.stderr)
        else:
            path.write_text(text, "utf-8")
            print(f"wrote {name}")
    return 1 if check and num_stale else 0


if __name__ == "__main__":
    sys.exit(main())
