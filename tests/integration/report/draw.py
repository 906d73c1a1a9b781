"""Draws docs/images/report.png from the recorded run: `python -m tests.integration.report.draw`."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path

from rljob_cli.report.collect import collect_run
from rljob_cli.report.page import render_page
from tests.paths import DATA, ROOT
from tests.support.browser import launch_chromium

_WIDTH, _HEIGHT = 1100, 1000


def main() -> None:
    page_text = render_page(collect_run(DATA / "report"), datetime(2026, 11, 22, tzinfo=UTC))
    with tempfile.TemporaryDirectory() as folder, launch_chromium() as browser:
        path = Path(folder) / "report.html"
        path.write_text(page_text, encoding="utf-8")
        page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
        page.goto(path.as_uri())
        page.locator("#curves").evaluate("each => each.scrollIntoView({behavior: 'instant'})")
        page.screenshot(path=ROOT / "docs" / "images" / "report.png")


if __name__ == "__main__":
    main()
