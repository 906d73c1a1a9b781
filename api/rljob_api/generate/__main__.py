"""`python -m rljob_api.generate [--check]`: write the CRDs (crds/ and the Helm chart) and docs/reference.md.

Invariant: the files in git equal the output; `--check` (make verify) fails on drift and writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rljob_api.generate.crd import build_chart_template, build_crd, build_manifest, build_object_schema
from rljob_api.generate.reference import build_reference
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardModel

_ROOT = Path(__file__).resolve().parents[3]


def build_files() -> dict[str, str]:
    """Return path in the repository -> content of all generated files."""
    files = {"docs/reference.md": build_reference(build_object_schema(RLJob), build_object_schema(RewardModel))}
    for model in (RLJob, RewardModel):
        crd = build_crd(model)
        name = f"{crd['metadata']['name']}.yaml"
        files[f"crds/{name}"] = build_manifest(crd)
        files[f"charts/rljob/templates/crds/{name}"] = build_chart_template(crd)
    return files


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m rljob_api.generate", description="Write crds/ and docs/reference.md.")
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
