"""`rljob ui` in a real browser: long answers, points that lead to samples, runs laid over each other, live steps."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from rljob_api.run.folder import trajectory_file
from rljob_api.run.metrics import append_records
from rljob_api.run.trajectories import RecentSamples
from rljob_api.wire.driver_status import DriverStatus
from rljob_cli.run.endpoint import Endpoint, remove_endpoint, write_endpoint
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Group, ScoredResult
from rljob_trainer.history.trajectory_log import write_file
from tests.paths import DATA
from tests.support.browser import launch_chromium
from tests.support.episodes import episode
from tests.support.records import result_row, sample_row, step_record

pytestmark = pytest.mark.slow  # on a fresh machine it installs the browser
RLJOB = Path(sys.executable).with_name("rljob")
NUM_SAMPLES, NUM_WORDS = 512, 4_000
MAX_PAGE_BYTES = 2_000_000


@pytest.fixture(scope="module")
def browser():
    with launch_chromium() as browser:
        yield browser


def sample(index: int):
    """An answer of 4,000 words; the reward of each is slower than that of the one before, and each 64th fails."""
    failed = ScoredResult(id="x", valid=False, reason="timeout", message="killed", latency_seconds=90.0 + index)
    valid = ScoredResult(id="x", valid=True, score=index / 1000, latency_seconds=index / 100)
    result = failed if index % 64 == 0 else valid
    text = " ".join(f"word{index}" for _ in range(NUM_WORDS))
    return episode(text=text, index=(0, 0, index), results={"judge": result}, score=result.score)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    parent = tmp_path_factory.mktemp("runs")
    for name in ("letters", "other"):
        shutil.copytree(DATA / "report", parent / name)
    for name in (
        "begun-with-a-name-that-has-the-model-the-data-and-the-learning-rate",
        *(f"begun-{n}" for n in range(12)),
    ):
        (parent / name).mkdir()
        shutil.copy(DATA / "report/job.yaml", parent / name)
    group = Group(0, Prompt(0, "question", [1]), [sample(index) for index in range(NUM_SAMPLES)])
    write_file(trajectory_file(parent / "letters", 9, "train"), "train", 9, [group])
    return parent


@pytest.fixture(scope="module")
def url(runs):
    process = subprocess.Popen([RLJOB, "ui", runs], stdout=subprocess.PIPE, text=True)
    yield process.stdout.readline().strip()
    process.terminate()
    assert process.wait() == 0


class Opened:
    def __init__(self, browser, url: str, **options):
        self.page: Page = browser.new_context(**options).new_page()
        self.page.set_default_timeout(120_000)
        self.complaints: list[str] = []
        self.num_bytes = 0
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("response", self._count)
        self.page.goto(url)
        self.page.locator(".sample").first.wait_for()

    def _count(self, response) -> None:
        self.num_bytes += int(response.headers.get("content-length", 0))

    def close(self):
        self.page.context.close()
        assert self.complaints == []


@pytest.fixture
def opened(browser, url):
    opened = Opened(browser, f"{url}?run=letters", viewport={"width": 1280, "height": 900})
    yield opened
    opened.close()


def choose(page: Page, name: str, value: str) -> None:
    page.locator(f"#filters [name={name}]").select_option(value)


def choose_step(page: Page, step: int, lane: str) -> None:
    page.locator("#filters [name=step]").fill(str(step))
    choose(page, "lane", lane)


def titles(page: Page) -> list[str]:
    """Return for each sample the heading of its group, and its own."""
    return page.locator("#samples .sample").evaluate_all("""all => all.map((each) =>
      `${each.closest(".group").querySelector("h3").textContent}, ${each.querySelector("h3").textContent}`)""")


def test_long_answers_come_page_by_page(opened):
    page = opened.page
    expect(page.locator("#count")).to_have_text(f"{NUM_SAMPLES + 152} of {NUM_SAMPLES + 152} samples match")
    choose_step(page, 9, "train")
    expect(page.locator("#count")).to_have_text(f"{NUM_SAMPLES} of {NUM_SAMPLES} samples match")
    choose(page, "order", "slow")
    expect(page.locator(".sample h3").first).to_have_text(f"Sample {NUM_SAMPLES - 64}")
    assert page.locator(".sample").count() == 40
    page.get_by_role("button", name="Show 40 more").click()
    expect(page.locator(".sample")).to_have_count(80)
    choose(page, "reason", "timeout")
    expect(page.locator("#count")).to_have_text(f"{NUM_SAMPLES // 64} of {NUM_SAMPLES} samples match")
    assert opened.num_bytes < MAX_PAGE_BYTES, "512 answers of 4,000 words are 18 MB"


def test_point_of_a_curve_leads_to_the_samples_of_its_step(opened):
    page = opened.page
    over = page.locator("#curves figure").first.locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    over.click(position={"x": box["width"] / 8 * 3, "y": 20})  # the axis ends at step 8, until a test adds one
    expect(page.locator("#count")).to_have_text("16 of 16 samples match")
    assert all(title.startswith("Step 3, training") for title in titles(page))
    assert page.evaluate("location.hash") == "#step=3&lane=train"
    values = page.locator("#curves figure").first
    values.locator("summary").click()
    values.locator(".numbers button").last.press("Enter")
    expect(page.locator(".group h3").first).to_contain_text("evaluation")
    assert page.evaluate("document.activeElement.id") == "trajectories-title"


def test_runs_are_listed_and_laid_over_each_other(opened):
    page = opened.page
    page.get_by_label("Lay other over letters").check()
    page.get_by_role("button", name="Show the curves of the chosen runs together").click()
    legend = page.locator("#curves figure").first.locator(".legend")
    expect(legend).to_contain_text("letters: training")
    expect(legend).to_contain_text("other: training")
    page.locator("#runs a", has_text="other").click()
    expect(page.locator("#runs [aria-current]")).to_have_text("other")
    page.locator(".sample").first.wait_for()


@pytest.mark.parametrize("width", [1000, 360])
def test_words_and_numbers_are_whole_and_the_run_that_is_shown_is_in_sight(browser, url, width):
    opened = Opened(browser, f"{url}?run=other", viewport={"width": width, "height": 900})
    num_lines = """cells => cells.map((cell) => {
      const range = document.createRange();
      range.selectNodeContents(cell);
      return new Set([...range.getClientRects()].map((each) => Math.round(each.bottom / 8))).size;
    })"""
    for selector in ("#runs td:not(.prose)", "#time td[data-value]:not(:has(meter))", ".sample td:not(.prose)"):
        assert max(opened.page.eval_on_selector_all(selector, num_lines)) == 1, selector
    narrowest = "all => Math.min(...all.map((each) => each.clientWidth))"
    for selector in ("#runs .prose", "#time .prose"):
        assert opened.page.eval_on_selector_all(selector, narrowest) >= 200, "text is no column of words"
    hidden = "all => Math.max(...all.map((each) => each.scrollWidth - each.clientWidth))"
    for selector in (".sample table", "#runs table") if width == 1000 else ():
        assert opened.page.eval_on_selector_all(selector, hidden) <= 0, f"{selector} has room for its columns"
    heights = "all => all.map((each) => each.offsetHeight)"
    assert len({*opened.page.eval_on_selector_all("#filters :is(input, select, button)", heights)}) == 1
    box, shown = (opened.page.locator(each).bounding_box() for each in (".list", "#runs [aria-current]"))
    assert box["y"] < shown["y"] < box["y"] + box["height"] - shown["height"]
    opened.close()


class Head(BaseHTTPRequestHandler):
    """A head that has scored two samples: one is invalid, and one has a long answer."""

    samples = (
        sample_row(sample=0, completion="short", rewards=[result_row(name="judge", reason="timeout")]),
        sample_row(sample=1, score=0.5, completion="word " * 500, rewards=[result_row(0.5, latency_seconds=9.75)]),
    )

    def do_GET(self):
        found = DriverStatus(step=8, total_steps=9, phase="score")
        if self.path.startswith("/samples"):
            after = int(self.path.partition("after=")[2])
            found = RecentSamples(feed="f", next=len(self.samples), samples=self.samples[after:])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(found.model_dump_json().encode())

    def log_message(self, *_): ...


@pytest.fixture
def head(runs):
    """The head of the run `other`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Head)
    Thread(target=server.serve_forever, daemon=True).start()
    write_endpoint(runs / "other", Endpoint(f"http://127.0.0.1:{server.server_port}", "secret"))
    yield
    remove_endpoint(runs / "other")
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("width", [1280, 360])
def test_scored_samples_take_one_line_each_and_open_to_their_texts(browser, url, head, width):
    opened = Opened(browser, f"{url}?run=other", viewport={"width": width, "height": 900})
    page = opened.page
    expect(page.locator("#scored tbody tr")).to_have_count(2)
    expect(page.locator("#none-scored")).to_be_hidden()
    expect(page.locator("#waits")).to_contain_text("8 of 9 have ended")
    last, first = page.locator("#scored tbody tr").all()
    assert last.inner_text().startswith("1, training, 0/1\t0.5\t9.8 s (r)\t-\t\nword word")
    assert "judge: timeout" in first.inner_text()
    assert last.bounding_box()["height"] == first.bounding_box()["height"], "a long answer takes one line"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    last.locator("summary").click()
    assert last.locator(".sample .text").inner_text().strip() == ("word " * 500).strip()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    opened.close()


def test_new_step_is_announced_and_drawn(opened, runs):
    page = opened.page
    expect(page.locator("#now")).to_be_hidden()
    expect(page.locator("#announce")).to_have_text("the run has ended")
    plot = page.locator("#curves figure").first.locator(".plot")
    expect(plot).to_have_attribute("aria-label", re.compile("training: .* in 8 points"))
    append_records(runs / "letters" / "metrics.jsonl", [step_record(9, reward=0.9, time=2e9)])
    expect(page.locator("#announce")).to_have_text("step 9, reward 0.900", timeout=120_000)
    expect(plot).to_have_attribute("aria-label", re.compile("training: .* to 0.9 in 9 points"), timeout=120_000)


@pytest.mark.parametrize("width", [1440, 1024, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_pictures_are_taken(browser, url, scheme, width, tmp_path):
    """The pictures are in $PICTURES, if it is set."""
    size = {"width": width, "height": 900}
    opened = Opened(browser, f"{url}?run=letters&with=other", color_scheme=scheme, viewport=size)
    found = Axe().run(opened.page)
    assert found.violations_count == 0, found.generate_report()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    path = Path(os.environ.get("PICTURES", tmp_path)) / f"page-{width}-{scheme}.png"
    opened.page.screenshot(path=path, full_page=True)
    assert path.stat().st_size > 50_000
    opened.close()


def test_a_run_has_one_colour_everywhere(browser, url):
    opened = Opened(browser, f"{url}?run=letters&with=other", viewport={"width": 1280, "height": 900})
    colours = """all => all.map(each => [each.parentElement.textContent.trim().split(/[:\\s]/)[0],
      getComputedStyle(each).borderTopColor])"""
    own = ("letters", "other")
    found = opened.page.eval_on_selector_all("#runs .swatch, .legend .swatch", colours)
    by_run = {name: {colour for run, colour in found if run == name} for name in own}
    assert {len(each) for each in by_run.values()} == {1}
    assert by_run["letters"] != by_run["other"]
    lengths = opened.page.locator("#curves figure", has_text="Completion length").locator(".legend .swatch")
    styles = lengths.evaluate_all("all => all.map(each => getComputedStyle(each).borderTopStyle)")
    assert styles[:3] == ["solid", "dotted", "dashed"], "the mean, the longest, and those that are held out"
    opened.close()


def test_page_fits_a_phone(browser, url):
    opened = Opened(browser, f"{url}?run=letters", viewport={"width": 360, "height": 800})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    opened.close()
