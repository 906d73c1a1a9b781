"""`rljob ui` beside a real run whose reward is slow: what the page shows while it trains, and what it costs.

`pytest tests/integration/report/test_ui_real.py -m nightly -s` prints the cost.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.integration.report.live_run import STEPS, open_live_run

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.nightly]


def test_page_shows_samples_as_they_are_scored_and_steps_as_they_end(tmp_path: Path) -> None:
    with open_live_run(tmp_path) as live:
        page = live.page
        page.locator("#scored tbody tr").first.wait_for()
        assert live.run.num_steps() < STEPS, "the first sample is shown long before the end"
        expect(page.locator("#waits")).to_contain_text("driver")
        live.wait_for_step_on_page(3)
        latencies = page.locator("#scored tbody td:nth-child(3)").all_inner_texts()
        assert all("judge" in text for text in latencies), "the slower one"
        live.run.wait_for_step(STEPS - 1)
        used, total = live.server_cpu_seconds(), live.run_cpu_seconds()
        print(json.dumps({"page_cpu_seconds": used, "run_cpu_seconds": total, "share": round(used / total, 4)}))
        assert live.run.finish().steps == STEPS
        expect(page.locator("#waits")).to_contain_text("none answers", timeout=60_000)
        points = page.locator("#curves figure").first.locator("circle:not([data-lane])")
        expect(points).to_have_count(STEPS, timeout=60_000)
