"""What all tests share: golden files, hypothesis profiles, the order of files, and the time of each group of tests."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from pathlib import Path, PurePath

import pytest
from hypothesis import HealthCheck, settings

# HYPOTHESIS_PROFILE selects: dev (default) is fast, ci repeats the same examples, nightly searches.
_SLOW_STEPS = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "dev", max_examples=10, stateful_step_count=20, deadline=None, suppress_health_check=_SLOW_STEPS
)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=1000, stateful_step_count=50)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Programs under test must not write the termination message of the container that runs the tests.
os.environ.setdefault("RLJOB_TERMINATION_LOG", os.devnull)

# Collection imports and builds half a million objects that stay. To scan them again and again took half of its time.
gc.disable()

_GROUP_DEPTH = 3
"""Folders of a test's path that name its group: tests/unit/rljob_api, tests/integration/apiserver."""


_LONGEST = Path(__file__).with_name("longest_files.txt")
"""Files whose tests take more than ten seconds, in the order of their time."""


@pytest.fixture(autouse=True)
def _a_hub_that_nobody_has_asked():
    """A process asks the Hub once for a repository; tests have other Hubs, at addresses that come again."""
    yield
    if module := sys.modules.get("rljob_inputs.hub"):
        module.find_repository.cache_clear()


def pytest_collection_modifyitems(items):
    """Begin with the longest files, so that no worker ends alone with one that began last (make passes the files on in
    this order). API servers run until the end of the session, so their tests stay behind."""
    order = {path: number for number, path in enumerate(_LONGEST.read_text().splitlines())}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_collection_finish():
    """Collect garbage from here on, but not what has been imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden files under tests/data again")


@pytest.fixture
def golden(request):
    """Compare a text with a golden file, or write the file with --update-golden."""

    def check(path, text):
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"{path} is missing; run pytest --update-golden, then read what it wrote"
        assert text == path.read_text(), (
            f"{path} differs; if you meant that, run pytest --update-golden and read the diff"
        )

    return check


def pytest_terminal_summary(terminalreporter):
    """Print the seconds of each group of tests; setup and teardown included, so shared servers count once."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folders = PurePath(report.nodeid.partition("::")[0]).parent.parts[:_GROUP_DEPTH]
                seconds["/".join(folders)] += report.duration
                tests["/".join(folders)] += report.when == "call"
    if len(seconds) > 1:
        terminalreporter.section("time by group")
        for group, total in seconds.most_common():
            terminalreporter.write_line(f"{total:8.1f} s {tests[group]:5} tests  {group}")
