"""Draws docs/images/ui.png from the live page of a real run with a slow reward (two minutes):
`python -m tests.integration.report.draw_live`.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from tests.integration.report.live_run import open_live_run
from tests.paths import ROOT


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, open_live_run(Path(folder)) as live:
        live.wait_for_step_on_page(4)
        live.page.locator("#waits tr", has_text=re.compile(r"\b[1-9][0-9]* in flight, [0-9]+ wait")).wait_for()
        live.page.locator("#now").evaluate("each => each.scrollIntoView({behavior: 'instant'})")
        live.page.screenshot(path=ROOT / "docs" / "images" / "ui.png")


if __name__ == "__main__":
    main()
