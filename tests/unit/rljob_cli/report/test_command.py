"""`rljob report`."""

import shutil

import pytest
from typer.testing import CliRunner

from rljob_cli.main import app
from tests.paths import DATA


@pytest.fixture
def runs(tmp_path):
    shutil.copytree(DATA / "report", tmp_path / "runs" / "letters")
    return tmp_path / "runs"


def report(*arguments):
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("by_name", [False, True])
def test_report_is_written_into_the_runs_folder_and_its_path_printed(runs, by_name):
    code, output, _ = report("letters", "--dir", runs) if by_name else report(runs / "letters")
    path = runs / "letters" / "report.html"
    assert (code, output) == (0, f"{path}\n")
    assert path.read_text().startswith("<!doctype html>")


def test_report_is_written_to_another_file(runs, tmp_path):
    path = tmp_path / "r.html"
    assert report(runs / "letters", "--to", path) == (0, f"{path}\n", "")
    assert path.stat().st_size > 10_000


def test_open_shows_the_page_in_a_browser(runs, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)))
    code, _, errors = report(runs / "letters", "--open")
    [url] = opened
    assert (code, url) == (0, (runs / "letters" / "report.html").as_uri())
    assert errors == f"no browser was found; open {url}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: run not found; pass its folder"),
        (["."], "not the folder of a run"),
        (["letters", "--to", "json"], "--to must be a file that ends with .html, got json"),
        (["letters", "--to", "none/r.html"], "none/r.html: No such file or directory"),
    ],
)
def test_invalid_arguments_are_one_message_and_exit_code_2(runs, monkeypatch, arguments, message):
    monkeypatch.chdir(runs)
    code, output, errors = report(*arguments, "--dir", runs)
    assert code == 2
    assert message in output + errors
