"""The packages that a worker of another Python environment gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rljob_api
import rljob_plugins
import rljob_service
from rljob_api.functions.plugins import find_plugins
from rljob_service.pool.worker_packages import find_worker_packages


@pytest.fixture(autouse=True)
def _own_plugins() -> Iterator[None]:
    """Plugins are looked for once per process."""
    find_plugins.cache_clear()
    yield
    find_plugins.cache_clear()


def test_packages_are_those_of_rljob_and_of_installed_plugins() -> None:
    expected = {each.__name__: Path(each.__path__[0]) for each in (rljob_api, rljob_plugins, rljob_service)}
    assert find_worker_packages() == expected


def test_plugin_may_be_one_file_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rljob_single.py").touch()
    information = tmp_path / "rljob_single-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: rljob-single\nVersion: 1.0\n")
    names = "[rljob.environments]\nsingle = rljob_single\nlost = rljob_lost.environment\n"
    (information / "entry_points.txt").write_text(names)
    monkeypatch.syspath_prepend(tmp_path)
    found = find_worker_packages()
    assert found["rljob_single"] == tmp_path / "rljob_single.py"
    assert "rljob_lost" not in found
