"""The site has every page, with links that lead somewhere and blocks that its parser divides as GitHub does."""

import json
import re
import tomllib

import pytest

from dev.site.blocks import name_headers, separate_blocks
from dev.site.links import find_links, replace_links
from dev.site.publish import order_versions, publish
from dev.site.tree import PAGES, ROOT, find_pages, write_tree

SETTINGS = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
PLACES = {"docs/a.md": "a.md", "docs/install/b.md": "install/b.md", "examples/x/README.md": "examples/x/README.md"}


def list_navigation(entries):
    """Return the pages of a part of the navigation, in order."""
    values = [value for entry in entries for value in entry.values()]
    return [page for value in values for page in ([value] if isinstance(value, str) else list_navigation(value))]


def test_navigation_has_each_page_of_docs_and_examples_once():
    listed = list_navigation(SETTINGS["nav"])
    pages = find_pages()
    needed = {site for source, site in pages.items() if source.startswith(("docs/", "examples/"))}
    assert len(listed) == len(set(listed))
    assert needed <= set(listed), f"zensical.toml lacks {sorted(needed - set(listed))}"
    assert set(listed) <= set(pages.values())


def test_generator_reads_the_folder_that_is_written():
    assert ROOT / SETTINGS["docs_dir"] == PAGES


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    write_tree(folder)
    return folder


def test_all_links_of_the_site_lead_to_its_files(tree):
    missing = [
        f"{page.relative_to(tree)}: {link}"
        for page in tree.rglob("*.md")
        for link in find_links(page.read_text())
        if "://" not in link and not (page.parent / (link.partition("#")[0] or page.name)).is_file()
    ]
    assert not missing


def test_files_that_are_no_longer_pages_are_removed(tree):
    (tree / "old.md").write_text("# Old\n")
    kept = (tree / "index.md").stat().st_mtime_ns
    write_tree(tree)
    assert not (tree / "old.md").exists()
    assert (tree / "index.md").stat().st_mtime_ns == kept, "the server would build unchanged pages again"


@pytest.mark.parametrize(
    ("page", "text", "replaced"),
    [
        ("docs/a.md", "[b](install/b.md#c)", "[b](install/b.md#c)"),
        ("docs/install/b.md", "[x](../../examples/x/README.md)", "[x](../examples/x/README.md)"),
        ("docs/a.md", "[`x`](../examples/x)", "[`x`](examples/x/README.md)"),
        ("docs/a.md", "![i](images/i.png)", "![i](images/i.png)"),
        ("docs/a.md", "[`f()`](../api/f.py#L3)", "[`f()`](source/api/f.py.txt)"),
        ("docs/a.md", "[`a[]`](../api/g)", "`a[]`"),
        ("docs/a.md", "[u](https://x.y/z) [h](#here)", "[u](https://x.y/z) [h](#here)"),
        ("docs/a.md", "`[b](../api/g)`", "`[b](../api/g)`"),
        ("docs/a.md", "```\n[b](../api/g)\n```\n", "```\n[b](../api/g)\n```\n"),
    ],
)
def test_link_is_replaced_by_what_the_site_has(page, text, replaced):
    def place(name):
        if name == "api/g":
            return None
        known = PLACES.get(name) or PLACES.get(f"{name}/README.md")
        return known or (name.removeprefix("docs/") if name.startswith("docs/") else f"source/{name}.txt")

    assert replace_links(text, page, place) == replaced


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("text\n- a\n- b\n", "text\n\n- a\n- b\n"),
        ("- a\n  more\n- b\n", "- a\n  more\n- b\n"),
        ("1. a\n   more\n2. b\n", "1. a\n   more\n2. b\n"),
        ("- a\n# h\n", "- a\n\n# h\n"),
        ("| a |\n|---|\n# h\n", "| a |\n|---|\n\n# h\n"),
        ("<!-- c -->\n| a |\n", "<!-- c -->\n\n| a |\n"),
        ("# h\ntext\nmore\n", "# h\n\ntext\nmore\n"),
        ("text\n```\n# no heading\n- no list\n```\ntext\n", "text\n\n```\n# no heading\n- no list\n```\n\ntext\n"),
        ("```yaml\na\n```\n| t |\n", "```yaml\na\n```\n\n| t |\n"),
    ],
)
def test_blocks_are_separated_by_blank_lines(text, blocks):
    assert separate_blocks(text) == blocks
    assert separate_blocks(blocks) == blocks


def test_empty_headers_of_tables_get_a_name_that_nobody_sees():
    named = '| a | <span class="only-read">column 2</span> |\n|---|---|\n| | b |\n'
    assert name_headers("| a | |\n|---|---|\n| | b |\n") == named
    assert name_headers("```\n| | |\n```\n") == "```\n| | |\n```\n"


def test_published_site_has_a_link_below_each_page_that_edits_it(tmp_path):
    write_tree(tmp_path, repository="https://host/o/r")
    for place, source in (("install.md", "docs/install.md"), ("project/changelog.md", "CHANGELOG.md")):
        assert f"[Edit this page](https://host/o/r/edit/main/{source})" in (tmp_path / place).read_text()


def test_each_version_has_a_folder_and_the_newest_release_is_first(tmp_path):
    html = tmp_path / "html"
    html.mkdir()
    (html / "index.html").write_text("new")
    folder = tmp_path / "published"
    folder.mkdir()
    for version in ("dev", "0.9.0", "0.10.0", "dev"):
        publish(folder, version, html)
    assert [each["version"] for each in json.loads((folder / "versions.json").read_text())] == [
        "0.10.0",
        "0.9.0",
        "dev",
    ]
    assert "url=0.10.0/" in (folder / "index.html").read_text()
    assert (folder / "0.9.0" / "index.html").read_text() == "new"
    assert order_versions({"dev"}) == ["dev"]


def test_no_page_loads_anything_from_another_host():
    assert SETTINGS["theme"]["font"] is False
    images = [link for path in find_pages() for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / path).read_text())]
    assert images
    assert not [link for link in images if "://" in link]
