"""Exports in a run's folder: whole under their names, whatever fails."""

import os

import pytest

from rljob_api.run.folder import EXPORT, export_folder, list_exports
from rljob_trainer.history.run_state import place_export, remove_export, remove_exports, write_partial


def writer(text):
    async def write(folder):
        (folder / "config.json").write_text(text)
        return 0.5

    return write


async def test_export_is_replaced_by_a_complete_one_only(tmp_path):
    async def fail(folder):
        (folder / "other").write_text("torn")
        raise RuntimeError("a rank died")

    export = tmp_path / EXPORT
    assert await write_partial(tmp_path, writer("old")) == 0.5
    assert not export.exists()
    place_export(tmp_path, export)
    with pytest.raises(RuntimeError):
        await write_partial(tmp_path, fail)
    assert (export / "config.json").read_text() == "old"
    await write_partial(tmp_path, writer("new"))
    place_export(tmp_path, export)
    assert [path.name for path in tmp_path.iterdir()] == [EXPORT], "nothing remains of the failed and the old one"
    assert {path.name: path.read_text() for path in export.iterdir()} == {"config.json": "new"}


async def test_placed_export_is_younger_than_its_checkpoint(tmp_path):
    await write_partial(tmp_path, writer("model"))
    os.utime(tmp_path / ".export.partial", (0, 0))
    place_export(tmp_path, export_folder(tmp_path, 2))
    assert export_folder(tmp_path, 2).stat().st_mtime > 0


def test_export_that_is_half_removed_has_no_name(tmp_path, monkeypatch):
    folder = export_folder(tmp_path, 2)
    folder.mkdir(parents=True)
    monkeypatch.setattr("rljob_trainer.history.run_state.shutil.rmtree", lambda *args, **options: None)
    remove_export(tmp_path, folder)
    assert not folder.exists()
    assert (tmp_path / ".export.removed").is_dir()


def test_only_exports_of_steps_that_are_gone_are_removed(tmp_path):
    for step in (2, 10, 1000000):
        export_folder(tmp_path, step).mkdir(parents=True)
    (tmp_path / "exports" / "step-mine").mkdir()
    remove_exports(tmp_path, lambda step: step == 2)
    assert list(list_exports(tmp_path)) == [10, 1000000]
    assert (tmp_path / "exports" / "step-mine").is_dir()
