"""What the documents name is there: links, make targets, and the smallest job of the README."""

import re
from pathlib import Path

import pytest

from rljob_api.load import load_manifests

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    links = [link for link in LINK.findall(document.read_text()) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing, f"{document.relative_to(ROOT)} links to {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_that_are_named_exist(document):
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([a-z0-9-]+)`", document.read_text()))
    missing = [
        target for target in named if not re.search(rf"^(?:[a-z0-9 -]* )?{target}(?: [a-z0-9 -]*)?:", makefile, re.M)
    ]
    assert not missing, f"{document.relative_to(ROOT)} names {missing}"


def test_the_smallest_job_of_the_readme_is_valid():
    text = (ROOT / "README.md").read_text()
    example = re.search(r"```yaml\n(apiVersion.*?)```", text, re.S)
    assert example, "the README shows the smallest job"
    (job,) = load_manifests(example[1], "README.md")
    assert job.metadata.name == "gsm8k"
