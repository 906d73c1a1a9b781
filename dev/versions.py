"""Write RLJob's version wherever it stands: `python -m dev.versions [--check]`.

The one source is `version` in pyproject.toml. Packages have it as it is; images and the chart have it as a tag, since
neither a tag nor a label may have a `+`. Main has a version of development, such as 0.2.0.dev0: `make release` sets a
released one for one commit.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from dev.folders import ROOT
from rljob_core.defaults import image_tag

SOURCE = Path("pyproject.toml")
_NUMBER = r"\d+\.\d+\.\d+(?:\.dev\d+)?(?:\+\w+)?"
_TAG = r"\d+\.\d+\.\d+(?:-dev)?(?:\.g\w+)?"
_IMAGE = rf"(rljob/(?:operator|trainer|reward(?:-py\d+)?):){_TAG}\b"
_PIN = rf"(rljob(?:-\w+)?(?:\[[\w,]+\])?==){_NUMBER}"

_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "pyproject.toml": (rf'(?m)^(version = "){_NUMBER}',),
    "*/pyproject.toml": (rf'(?m)^(version = "){_NUMBER}', _PIN),
    "uv.lock": (rf'(name = "rljob[\w-]*"\nversion = "){_NUMBER}',),
    "api/rljob_api/__init__.py": (rf'(?m)^(__version__ = "){_NUMBER}',),
    "docs/*.md": (_PIN,),
    **dict.fromkeys(("crds/*.yaml", "charts/rljob/templates/crds/*.yaml"), (rf"(rljob\.dev/version: ){_NUMBER}",)),
}
"""Where a package's version follows the group, by glob."""
_TAGS: Mapping[str, tuple[str, ...]] = {
    "charts/rljob/Chart.yaml": (rf"(?m)^(version: ){_TAG}", rf"(?m)^(appVersion: ){_TAG}", _IMAGE),
    "charts/rljob/values.yaml": (_IMAGE,),
    "charts/rljob/README.md": (_IMAGE,),
    "charts/rljob/tests/*.yaml": (_IMAGE,),
    "docs/*.md": (_IMAGE,),
    "e2e/**/*.yaml": (_IMAGE,),
    "e2e/**/*.py": (_IMAGE,),
}
"""Where a tag follows the group."""


def read_version(root: Path = ROOT) -> str:
    return str(tomllib.loads((root / SOURCE).read_text())["project"]["version"])


def find_changes(root: Path, version: str) -> dict[Path, str]:
    """Return the new text of each file that has another version, by its path relative to `root`."""
    texts: dict[Path, str] = {}
    for path, pattern, written in _list_places(root, version):
        text = texts.get(path) or (root / path).read_text()
        texts[path] = re.sub(pattern, lambda match, written=written: match[1] + written, text)
    return {path: text for path, text in texts.items() if text != (root / path).read_text()}


def _list_places(root: Path, version: str) -> Iterator[tuple[Path, str, str]]:
    for places, written in ((_NUMBERS, version), (_TAGS, image_tag(version))):
        for glob, patterns in places.items():
            for path in sorted(root.glob(glob)):
                yield from ((path.relative_to(root), pattern, written) for pattern in patterns)


def write_version(root: Path, version: str) -> list[Path]:
    """Return the files that were changed."""
    changes = find_changes(root, version)
    for path, text in changes.items():
        (root / path).write_text(text)
    return sorted(changes)


def main(arguments: list[str]) -> int:
    version = read_version()
    if "--check" not in arguments:
        write_version(ROOT, version)
    elif changes := find_changes(ROOT, version):
        names = ", ".join(map(str, sorted(changes)))
        print(f"{names}: another version than {version} of pyproject.toml; run `make generate`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
