"""Completion, as the shell and as kubectl call it."""

from __future__ import annotations

import pytest

from rljob_cli import kubectl_completion


@pytest.fixture
def complete(tmp_path, monkeypatch, capsys):
    """Complete in a folder with two runs, as kubectl does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("_RLJOB_COMPLETE", "")  # so that its value is restored
    monkeypatch.setenv("COMP_WORDS", "")
    monkeypatch.setenv("COMP_CWORD", "")
    for name in ("sums", "chat"):
        (tmp_path / "runs" / name).mkdir(parents=True)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["kubectl_complete-rljob", *arguments])
        kubectl_completion.main()
        return capsys.readouterr().out.split()

    return run


def test_commands_complete_by_their_first_letters(complete):
    assert complete("re") == ["report", "restart", "resume", ":4"]


@pytest.mark.parametrize(("typed", "names"), [("", ["chat", "sums", ":4"]), ("s", ["sums", ":4"])])
def test_runs_complete_by_the_names_of_their_folders(complete, typed, names):
    assert complete("trajectories", typed) == names


def test_runs_of_another_parent_folder_complete(complete, tmp_path):
    (tmp_path / "others" / "gsm8k").mkdir(parents=True)
    assert complete("trajectories", "--dir", "others", "") == ["gsm8k", ":4"]


def test_formats_of_output_complete(complete):
    assert complete("run", "-o", "") == ["live", "plain", "json", ":4"]


def test_files_complete_by_the_shell(complete):
    assert complete("validate", "") == [":0"]


def test_jobs_complete_silently_without_a_cluster(complete):
    assert complete("top", "") == [":0"]
