"""The folder that the generator reads: each page at its place, and the files that pages link to as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dev.site.blocks import name_headers, separate_blocks
from dev.site.links import find_links, replace_links, resolve

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / ".site" / "pages"
"""As `docs_dir` of zensical.toml."""
THEME = ("site.css", "site.js")
"""Files of this package, as `extra_css` and `extra_javascript` of zensical.toml."""


def find_pages(root: Path = ROOT) -> dict[str, str]:
    """Return the path on the site of each page, by its path in the repository.

    Pages are all of docs/, the READMEs of the examples, and the Markdown of the root: in project/, except for the
    README, whose place docs/index.md has.
    """
    docs = {path: path.relative_to(root / "docs") for path in root.glob("docs/**/*.md")}
    examples = {path: path.relative_to(root) for path in root.glob("examples/**/README.md")}
    project = {path: Path("project") / path.name.lower() for path in root.glob("*.md")}
    pages = {path.relative_to(root).as_posix(): place.as_posix() for path, place in (docs | examples | project).items()}
    return pages | {"README.md": "index.md"}


def find_place(name: str, pages: dict[str, str], root: Path = ROOT) -> str | None:
    """Return where the site has a file or folder of the repository; None for a folder without a README.

    A file that is no page is copied as text, so that a browser shows it.
    """
    page = pages.get(name) or pages.get(f"{name}/README.md")
    if page or (root / name).is_dir():
        return page
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"source/{name}.txt"


def write_tree(folder: Path = PAGES, root: Path = ROOT, repository: str = "") -> int:
    """Write the folder anew, and return the number of its pages. What has not changed keeps its time.

    `repository`: its address, for a link below each page that edits it.
    """
    pages = find_pages(root)
    files = dict(_read_files(pages, root, repository)) | {
        name: (ROOT / "dev" / "site" / name).read_bytes() for name in THEME
    }
    for path in [each for each in folder.rglob("*") if each.is_file()]:
        if path.relative_to(folder).as_posix() not in files:
            path.unlink()
    for name, content in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return sum(name.endswith(".md") for name in files)


def _read_files(pages: dict[str, str], root: Path, repository: str) -> Iterator[tuple[str, bytes]]:
    """Yield the path on the site and the content of each page and of each file that one links to."""

    def place(name: str) -> str | None:
        return find_place(name, pages, root)

    for name, target in pages.items():
        if name == "README.md":
            continue
        text = (root / name).read_text()
        page = name_headers(separate_blocks(replace_links(text, name, place)))
        if repository:
            page += f"\n[Edit this page]({repository}/edit/main/{name})\n"
        yield target, page.encode()
        for link in find_links(text):
            linked = resolve(name, link.partition("#")[0])
            if (root / linked).is_file() and linked not in pages:
                yield place(linked) or linked, (root / linked).read_bytes()
