"""A run gets the model that it begins with once, and keeps it."""

import pytest

from rljob_api.errors import UserError
from rljob_api.run.folder import export_folder
from rljob_api.run.start_model import FILE_PIN
from rljob_cli.check.job_source import MODEL, find_start_model, read_pin
from rljob_cli.export import start_model
from rljob_cli.export.start_model import provide_model
from tests.unit.rljob_cli.check.test_job_source import runs, write_export  # noqa: F401 - a fixture


@pytest.fixture
def exports(monkeypatch):
    """The steps that were exported."""
    asked = []

    def export_step(run, step, to, given):
        asked.append(step)
        to.mkdir()
        (to / "config.json").write_text(f"{step}")

    monkeypatch.setattr(start_model, "export_step", export_step)
    return asked


def find(runs, source="job://sums@last"):  # noqa: F811
    return find_start_model(source, runs, runs / "j")


def test_checkpoint_is_exported_once_and_pinned(runs, exports, tmp_path):  # noqa: F811
    lines = []
    assert provide_model(find(runs), runs / "j", lines.append) == str(runs / "j" / MODEL)
    assert (exports, read_pin(runs / "j").step) == ([4], 4)
    provide_model(find(runs), runs / "j", lines.append)
    assert exports == [4]
    assert lines == [f"starts from step 4 of {runs}/sums", f"starts from step 4 of {runs}/sums, as before"]


def test_export_that_exists_is_taken_and_survives_its_run(runs, exports):  # noqa: F811
    (write_export(runs, 4) / "config.json").write_text("of the run")
    model = provide_model(find(runs), runs / "j", print)
    assert exports == []
    (export_folder(runs / "sums", 4) / "config.json").unlink()
    assert (runs / "j" / MODEL / "config.json").read_text() == "of the run"
    assert model == str(runs / "j" / MODEL)


def test_failed_export_leaves_no_pin_and_the_next_start_repeats_it(runs, exports, monkeypatch):  # noqa: F811
    (runs / "j").mkdir()
    (runs / "j" / FILE_PIN).write_text("of another source")

    def fail(run, step, to, given):
        raise UserError(f"{given}: the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(start_model, "export_step", fail)
        with pytest.raises(UserError, match=r"^spec.model.source: the disk is full"):
            provide_model(find(runs), runs / "j", print)
    assert not (runs / "j" / FILE_PIN).exists()
    provide_model(find(runs), runs / "j", print)
    assert exports == [4]
