"""Models of the examples are created completely or not at all."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.paths import EXAMPLES
from tests.support.modules import load_module


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_module(EXAMPLES / "prepare.py")
    monkeypatch.setattr(module, "MODELS", tmp_path / "models")
    return module


def write(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "config.json").chmod(0o600)


def test_model_is_created_once_and_readable_by_all_users(
    prepare: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare.prepare_model("m", write)
    assert (prepare.MODELS / "m" / "config.json").stat().st_mode & 0o777 == 0o644
    prepare.prepare_model("m", lambda folder: pytest.fail("created a second time"))
    assert len(capsys.readouterr().out.splitlines()) == 2, "one line for each call"


def test_failed_model_leaves_no_folder(prepare: ModuleType) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        prepare.prepare_model("m", fail)
    assert list(prepare.MODELS.iterdir()) == []


def test_the_teacher_is_what_the_demo_has_trained(prepare: ModuleType, tmp_path: Path, capsys) -> None:
    prepare.DEMO_EXPORT = tmp_path / "export"
    with pytest.raises(SystemExit, match="export not found: it is what `make demo` trains; run that first"):
        prepare.prepare_model("sums", prepare.copy_demo)
    assert list(prepare.MODELS.iterdir()) == []
    prepare.DEMO_EXPORT.mkdir()
    write(prepare.DEMO_EXPORT)
    prepare.prepare_model("sums", prepare.copy_demo)
    assert (prepare.MODELS / "sums" / "config.json").is_file()


def test_two_concurrent_calls_leave_one_folder(prepare: ModuleType) -> None:
    def race(folder: Path) -> None:
        write(folder)
        prepare.prepare_model("m", write)

    prepare.prepare_model("m", race)
    assert [folder.name for folder in prepare.MODELS.iterdir()] == ["m"]


def test_unknown_example_is_rejected(prepare: ModuleType) -> None:
    with pytest.raises(SystemExit):
        prepare.main(["nothing"])
