"""Modules of projects that are not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

from rljob_service.worker.forms.stand_ins import provide_module


class Base:
    pass


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.mark.usefixtures("clean")
def test_missing_module_and_its_packages_are_importable_with_the_classes() -> None:
    finders = len(sys.meta_path)
    provide_module("rljob_absent.agents.base", {"Base": Base})
    provide_module("rljob_absent.agents.base", {"Base": Base})
    assert len(sys.meta_path) == finders + 1, "once"
    assert importlib.import_module("rljob_absent.agents.base").Base is Base
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rljob_absent.agents.other")


@pytest.mark.usefixtures("clean")
def test_installed_module_wins() -> None:
    provide_module("json.decoder", {"JSONDecoder": Base})
    sys.modules.pop("json.decoder")
    assert importlib.import_module("json.decoder").JSONDecoder is not Base
