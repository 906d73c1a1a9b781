"""The site of docs/ in a browser: readable by everyone, on a wide and a narrow screen, light and dark."""

import json
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from axe_playwright_python.sync_playwright import Axe

from dev.site.__main__ import ZENSICAL, build
from dev.site.publish import HTML
from tests.support.browser import launch_chromium

pytestmark = pytest.mark.slow  # on a fresh machine it installs the browser
PAGES = ["", "install/", "reference/", "rewards/", "agents/", "coming-from/", "install/eks/"]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *arguments):
        pass


@pytest.fixture(scope="module")
def address():
    if not ZENSICAL.is_file():
        pytest.skip("`make docs` installs what builds the site")
    assert build() == 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=HTML))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    with launch_chromium() as browser:
        yield browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing(browser, address, page, scheme):
    opened = browser.new_page(color_scheme=scheme, viewport={"width": 1440, "height": 900})
    opened.goto(address + page, wait_until="networkidle")
    found = Axe().run(opened)
    assert found.violations_count == 0, found.generate_report()
    opened.close()


@pytest.mark.parametrize("width", [1440, 390])
def test_nothing_of_the_first_page_is_cut_off(browser, address, width):
    opened = browser.new_page(viewport={"width": width, "height": 900})
    opened.goto(address, wait_until="networkidle")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    picture = opened.locator("img[src*=overview]").bounding_box()
    assert picture["x"] >= 0
    assert picture["x"] + picture["width"] <= width
    assert opened.locator("pre", has_text="make install").is_visible()
    opened.close()


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("air-gapped", "install/"),
        ("multi-node", "gpus/"),
        ("own dataset", "models-and-data/"),
        ("timeouts", "lifecycle/"),
        ("imagepullsecrets", "images/"),
    ],
)
def test_search_has_a_heading_of_the_page_that_answers(address, words, page):
    sections = json.loads((HTML / "search.json").read_text())["items"]
    found = [each["location"] for each in sections if words in each["title"].lower()]
    assert any(place.startswith(page) for place in found), found
