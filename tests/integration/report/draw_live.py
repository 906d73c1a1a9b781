"""Draws docs/images/ui.png from the live page of a real run with a slow reward (two minutes):
`python -m tests.integration.report.draw_live`.

The picture is of a moment in which samples are scored: some wait for a replica, and one of the last ten is invalid.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from playwright.sync_api import Page

from tests.integration.report.live_run import open_live_run
from tests.paths import ROOT

_PICTURE = ROOT / "docs" / "images" / "ui.png"
_IS_TELLING = """() => {
  const text = (selector) => document.querySelector(selector).innerText;
  const rows = [...document.querySelectorAll("#scored tbody tr")].slice(0, 10).map((row) => row.innerText);
  const waits = text("#waits");
  return /waits for ([3-9]|10) of 16 rewards/.test(waits) && /[1-9]\\d* wait for a replica/.test(waits)
    && rows.length === 10 && rows.some((row) => row.includes("exception")) && document.title.includes("Running");
}"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, open_live_run(Path(folder)) as live:
        live.wait_for_step_on_page(3)
        while not _draw(live.page):
            pass


def _draw(page: Page) -> bool:
    """Take a picture in a telling moment. Return whether it was still one afterwards."""
    page.wait_for_function(_IS_TELLING)
    page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
    end = page.locator("#now").bounding_box()
    assert end is not None
    size = {"x": 0, "y": 0, "width": end["x"] * 2 + end["width"], "height": end["y"] + end["height"]}
    page.screenshot(path=_PICTURE, clip=size, full_page=True)
    return bool(page.evaluate(_IS_TELLING))


if __name__ == "__main__":
    main()
