"""A headless Chromium: from PATH, else playwright's own, else Debian's package, which is installed.

A machine without any of them fails the test and says what to install: a page that no browser has opened is not tested.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from rljob_cluster.host.debian import install_missing

_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def launch_chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, _PROGRAMS)), None) or playwright.chromium.executable_path
        if not Path(found).exists():
            install_missing([_PROGRAMS[0]])
            found = shutil.which(_PROGRAMS[0]) or ""
        # Its own sandbox needs user namespaces, which containers often lack; the page is ours.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
