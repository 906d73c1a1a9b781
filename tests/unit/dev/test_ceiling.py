"""The ceiling of the code: what exceeds it is named."""

import json

import pytest

from dev import ceiling
from dev.ceiling import FILE, PACKAGES, Ceiling, Size

WALKS = {"prompt": {"functions": 10, "files": 4}}
BEFORE = Ceiling(
    total={"tokens": 1000, "files": 10, "functions": 100},
    packages={
        "api": {"tokens": 400, "files": 4, "functions": 40},
        "cli": {"tokens": 600, "files": 6, "functions": 60},
    },
    elsewhere={"dev": 50},
    walks=WALKS,
    taken={},
)


def size(*, api=400, cli=600, files=4, functions=40, dev=50, walks=WALKS):
    counts = {
        "api": {"tokens": api, "files": files, "functions": functions},
        "cli": {"tokens": cli, "files": 6, "functions": 60},
    }
    return Size(counts, {"dev": dev}, walks)


@pytest.mark.parametrize(
    ("source", "tokens", "functions"),
    [
        ("a = 1\n", 3, 0),
        ('"""Header."""\n\nX = 1  # why\n"""Meaning."""\n', 3, 0),
        ('def f():\n    """Text."""\n    return "text"\n', 7, 1),
        ("class A:\n    async def f(self): ...\n\n    def g(self): ...\n", 3 + 8 + 7, 2),
    ],
)
def test_docstrings_and_comments_are_no_tokens(source, tokens, functions):
    assert ceiling.count_source(source) == (tokens, functions)


def test_equal_size_is_within_the_ceiling():
    assert ceiling.find_excess(size(), BEFORE) == []


def test_packages_that_grew_are_named_and_others_are_not():
    (line,) = ceiling.find_excess(size(api=390, cli=611), BEFORE)
    assert line == "tokens: at most 1,000, got 1,001; grown since the ceiling was set: cli +11"


def test_each_measure_has_its_own_ceiling():
    lines = ceiling.find_excess(size(files=5, functions=41), BEFORE)
    assert [line.partition(":")[0] for line in lines] == ["files", "functions"]


def test_code_that_moves_out_of_the_packages_still_counts():
    assert ceiling.find_excess(size(cli=500, dev=150), BEFORE) == []
    (line,) = ceiling.find_excess(size(cli=500, dev=151), BEFORE)
    assert line.endswith("grown since the ceiling was set: dev +101")


def test_a_longer_walk_is_named():
    longer = {"prompt": {"functions": 11, "files": 4}}
    (line,) = ceiling.find_excess(size(walks=longer), BEFORE)
    assert line.startswith("walk prompt: at most 10 functions, got 11")


def test_lowering_never_raises():
    lowered = ceiling.lower(size(api=300, files=5, walks={"prompt": {"functions": 9, "files": 5}}), BEFORE)
    assert lowered.total == {"tokens": 900, "files": 10, "functions": 100}
    assert lowered.walks == {"prompt": {"functions": 9, "files": 4}}
    assert ceiling.find_excess(size(api=301), lowered), "what was deleted may not come back"


def test_what_was_lowered_counts_the_same_way_afterwards():
    moved = size(cli=500, dev=120)
    lowered = ceiling.lower(moved, BEFORE)
    assert lowered.total["tokens"] == 970
    assert ceiling.find_excess(moved, lowered) == []


def test_files_count_where_they_are(tmp_path):
    texts = {"api/a.py": "a = 1\n", "dev/b.py": "b = (1)\n", "cli/page.jinja": "{{ x }} y", "dev/ceiling.json": "{}"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    packages, elsewhere = ceiling.measure(tmp_path, texts)
    assert packages["api"] == {"tokens": 3, "files": 1, "functions": 0}
    assert elsewhere == {"dev": 5, "cluster": 0, "texts": 6}


def test_the_file_has_every_package():
    found = json.loads(FILE.read_text())
    read = ceiling.read()
    assert found.keys() == set(Ceiling._fields)
    assert tuple(read.packages) == PACKAGES
