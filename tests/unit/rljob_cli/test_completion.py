"""Completion, as the shell calls it."""

from __future__ import annotations

import contextlib
import shlex

import pytest

from rljob_cli.main import app


@pytest.fixture
def complete(tmp_path, monkeypatch, capsys):
    """Complete in a folder with two runs, as bash does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("_RLJOB_COMPLETE", "complete_bash")
    for name in ("sums", "chat"):
        (tmp_path / "runs" / name).mkdir(parents=True)

    def run(*arguments):
        monkeypatch.setenv("COMP_WORDS", shlex.join(["rljob", *arguments]))
        monkeypatch.setenv("COMP_CWORD", str(len(arguments)))
        with contextlib.suppress(SystemExit):
            app(prog_name="rljob")
        return capsys.readouterr().out.split()

    return run


def test_commands_complete_by_their_first_letters(complete):
    assert complete("re") == ["report", "restart", "resume"]


@pytest.mark.parametrize(("typed", "names"), [("", ["chat", "sums"]), ("s", ["sums"])])
def test_runs_complete_by_the_names_of_their_folders(complete, typed, names):
    assert complete("trajectories", typed) == names


def test_runs_of_another_parent_folder_complete(complete, tmp_path):
    (tmp_path / "others" / "gsm8k").mkdir(parents=True)
    assert complete("trajectories", "--dir", "others", "") == ["gsm8k"]


def test_formats_of_output_complete(complete):
    assert complete("run", "-o", "") == ["live", "plain", "json"]


def test_files_complete_by_the_shell(complete):
    assert complete("validate", "") == []


def test_jobs_complete_silently_without_a_cluster(complete):
    assert complete("top", "") == []
