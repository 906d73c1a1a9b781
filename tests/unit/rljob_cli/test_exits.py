"""Exit codes, and what leads to them."""

from __future__ import annotations

import errno
import re

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_cli import exits
from rljob_inputs.machine import installation
from tests.paths import ROOT


def raise_error(error):
    @exits.guard
    def command():
        raise error

    return command()


def test_documentation_has_the_exit_codes_of_the_program():
    text = (ROOT / "docs" / "cli.md").read_text()
    table = text[text.index("| exit code |") :].partition("\n\n")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)}
    assert codes == {0, *(value for name, value in vars(exits).items() if name.startswith("EXIT_"))}


def test_a_module_of_an_extra_is_named_with_the_command_that_installs_it(capsys, monkeypatch):
    monkeypatch.setattr(installation, "has_module", lambda name: False)
    assert raise_error(ModuleNotFoundError("x", name="pyarrow.parquet")) == exits.EXIT_BAD_INPUT
    assert capsys.readouterr().err.startswith("pyarrow.parquet is not installed; run `")


def test_any_other_missing_module_is_a_defect():
    with pytest.raises(ModuleNotFoundError):
        raise_error(ModuleNotFoundError("x", name="rljob_cli.absent"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("spec.x is wrong; fix it"), "spec.x is wrong; fix it"),
        (TransientError("no answer"), "no answer"),
        (FileNotFoundError(2, "No such file", "a.yaml"), "a.yaml: No such file; fix the file, or pass another path"),
    ],
)
def test_errors_of_the_input_are_one_message_and_exit_code_2(capsys, error, message):
    assert raise_error(error) == exits.EXIT_BAD_INPUT
    assert capsys.readouterr() == ("", f"{message}\n")


def test_deleted_current_folder_is_named(capsys, tmp_path, monkeypatch):
    """os.getcwd raises it without a file, and so do libraries for other reasons."""
    with pytest.raises(FileNotFoundError):
        raise_error(FileNotFoundError(errno.ENOENT, "Failed to open local file"))
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    assert raise_error(FileNotFoundError(errno.ENOENT, "No such file or directory")) == exits.EXIT_BAD_INPUT
    assert capsys.readouterr() == ("", "the current folder is deleted; change to another\n")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_one_message_and_a_failure(capsys, number):
    assert raise_error(OSError(number, "No space left")) == exits.EXIT_FAILED
    assert capsys.readouterr() == ("", "No space left; free disk space, or write to another disk\n")


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), RuntimeError("a defect")])
def test_defects_and_closed_pipes_are_not_errors_of_the_input(error):
    with pytest.raises(type(error)):
        raise_error(error)
