"""Models of the examples appear whole or not at all."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.paths import ROOT


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "examples" / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MODELS", tmp_path / "models")
    return module


def write(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "config.json").chmod(0o600)


def test_a_model_is_made_once_and_readable_by_all(prepare: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    prepare.prepare_model("m", write)
    assert (prepare.MODELS / "m" / "config.json").stat().st_mode & 0o777 == 0o644
    prepare.prepare_model("m", lambda folder: pytest.fail("made a second time"))
    assert len(capsys.readouterr().out.splitlines()) == 2, "one line for each call"


def test_a_model_that_cannot_be_made_leaves_nothing_behind(prepare: ModuleType) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise OSError("no room on the disk")

    with pytest.raises(OSError, match="no room"):
        prepare.prepare_model("m", fail)
    assert list(prepare.MODELS.iterdir()) == []


def test_of_two_calls_at_once_one_folder_stays(prepare: ModuleType) -> None:
    def race(folder: Path) -> None:
        write(folder)
        prepare.prepare_model("m", write)

    prepare.prepare_model("m", race)
    assert [folder.name for folder in prepare.MODELS.iterdir()] == ["m"]


def test_an_unknown_example_is_refused(prepare: ModuleType) -> None:
    with pytest.raises(SystemExit):
        prepare.main(["nothing"])
