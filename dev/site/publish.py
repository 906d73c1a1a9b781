"""The published site: a folder for each version, `versions.json` for the theme's choice, and a page that leads to the
newest release. `dev` is the version of the branch main."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from dev.site.tree import ROOT

HTML = ROOT / ".site" / "html"
"""As `site_dir` of zensical.toml."""


def write_settings(address: str) -> Path:
    """Write zensical.toml with the site's address, next to the pages, and return its path."""
    text = (ROOT / "zensical.toml").read_text().replace('".site/', '"')
    path = ROOT / ".site" / "zensical.toml"
    path.write_text(text.replace("[project]\n", f'[project]\nsite_url = "{address}"\n', 1))
    return path


def order_versions(versions: set[str]) -> list[str]:
    """Return the releases, newest first, and then `dev`."""
    return sorted(versions, key=lambda each: [-1] if each == "dev" else [int(n) for n in each.split(".")], reverse=True)


def publish(folder: Path, version: str, html: Path = HTML) -> None:
    """Put the built site into the folder as this version."""
    shutil.rmtree(folder / version, ignore_errors=True)
    shutil.copytree(html, folder / version)
    versions = order_versions({path.parent.name for path in folder.glob("*/index.html")})
    listed = [{"version": each, "title": each, "aliases": []} for each in versions]
    (folder / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
    (folder / "index.html").write_text(
        '<!doctype html><meta charset="utf-8"><title>RLJob</title>'
        f'<meta http-equiv="refresh" content="0; url={versions[0]}/">\n'
    )
    (folder / ".nojekyll").touch()
