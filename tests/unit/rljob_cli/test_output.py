"""Which arguments request JSON, and how errors look then."""

from __future__ import annotations

import json

import pytest

from rljob_api.read.documents import Problem
from rljob_api.read.load import InvalidManifestError
from rljob_cli import output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "job.yaml", "-o", "json"], True),
        (["run", "-ojson", "job.yaml"], True),
        (["run", "--output", "json"], True),
        (["run", "--output=json"], True),
        (["submit", "-o", "yaml"], False),
        (["validate", "json"], False),
        (["validate", "-f", "json"], False),
        (["validate", "-o"], False),
        ([], False),
    ],
)
def test_json_is_requested_by_each_form_of_the_option(arguments, expected):
    with output.choose_format(arguments):
        assert output.is_json() is expected
    assert not output.is_json(), "the next command in this process has its own format"


def test_error_about_fields_has_its_file_and_problems(capsys):
    with output.choose_format(["-o", "json"]):
        output.print_error(InvalidManifestError("job.yaml", [Problem("spec.x", 3, "is unknown")]), 2)
    assert json.loads(capsys.readouterr().out) == {
        "error": "job.yaml:3: spec.x is unknown",
        "exit_code": 2,
        "file": "job.yaml",
        "problems": [{"path": "spec.x", "line": 3, "message": "is unknown"}],
    }


def test_json_escapes_all_control_characters_and_loses_none(capsys):
    value = {"text": "\x1b[2J \x9b \x7f \0 ä"}
    output.print_json(value)
    printed = capsys.readouterr().out
    assert printed.removesuffix("\n").isprintable()
    assert json.loads(printed) == value


def test_error_is_text_on_stderr_otherwise(capsys):
    output.print_error("taken: File exists", 2)
    assert capsys.readouterr() == ("", "taken: File exists\n")
