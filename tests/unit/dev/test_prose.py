"""The check of the prose finds each kind of text in each kind of file, and nothing else."""

from pathlib import Path

import pytest

from dev.prose.check import MAX_SENTENCE_WORDS, SKIPPED, check_file

BANNED = "at" + " rest"  # spelled so that this file passes its own check


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.md", f"# Title\n\nIt is {BANNED}.\n", [3]),
        ("a.md", "It is at\nrest.\n", [1]),  # words: ok
        ("a.md", f"```\nbe {BANNED}\n```\n`{BANNED}` is code.\n", []),
        ("a.py", f'"""Be {BANNED}."""\n', [1]),
        ("a.py", f'x = f"is {BANNED}, {{1}}"\n', [1]),
        ("a.py", 'x: int\n"""' + "Of a step." + '"""\n', [2]),
        ("a.py", 'x: int\n"""Seconds of a step."""\n', []),
        ("a.py", "x = 1  # is at\n# rest\n", [1]),
        ("a.py", "def wait_at_rest(): ...\n", [1]),
        ("a.py", f"x = 1  # {BANNED}  # words: ok\n", []),
        ("a.py", "y = at_each(rest)\n", []),
        ("values.yaml", f"a: 1\n# It is {BANNED}.\nb: {BANNED}\n", [2]),
        ("Makefile", f"x: ## Be {BANNED}\n", [1]),
        ("a.bin", BANNED, []),
    ],
)
def test_prose_check_reports_the_lines_of_banned_words(name, text, lines):
    assert [line for line, _ in check_file(Path(name), text)] == lines


def test_prose_check_reports_banned_parts_of_identifiers():
    assert [line for line, _ in check_file(Path("a.py"), "a = 1\n" + "LONG" + "EST_WAIT = 2\n")] == [2]


def test_prose_check_reports_long_sentences_of_documents_but_not_of_tables():
    long = "word " * (MAX_SENTENCE_WORDS + 1)
    assert [line for line, _ in check_file(Path("a.md"), f"Short.\n\n{long}.\n\n| {long} |\n")] == [3]


def test_prose_check_reports_long_names_of_tests():
    source = f"def test_{'a' * 70}(): ...\n\n\ndef test_{'a' * 90}(): ...\n"
    assert [line for line, _ in check_file(Path("test_a.py"), source)] == [4]


@pytest.mark.parametrize(
    "path", ["crds/rljob.dev_rljobs.yaml", "docs/reference.md", "tests/data/plan/full/job.yaml", "uv.lock"]
)
def test_prose_check_skips_generated_files_and_data(path):
    assert SKIPPED.search(path)
