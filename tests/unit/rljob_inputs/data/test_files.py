"""Files that are neither plain JSON lines nor Parquet."""

import bz2
import csv
import gzip
import json
import lzma
from concurrent.futures import ThreadPoolExecutor

import pyarrow
import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.job_sections import DataSource
from rljob_inputs.data.files import find_files, list_splits
from rljob_inputs.data.rows import read_rows
from rljob_inputs.findings import InputError

ROWS = [{"question": "1 + 1?", "answer": "two"}, {"question": "2, or 3?", "answer": "three"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(autouse=True)
def caches_in_the_test(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    yield
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()], "a check writes nothing"


def read(path, lane="train", **fields):
    return list(read_rows(DataSource(source="./d", **fields), str(path), split=lane))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.csv", b'question,answer\n1 + 1?,two\n"2, or 3?",three\n'),
        ("d.tsv", b"question\tanswer\n1 + 1?\ttwo\n2, or 3?\tthree\n"),
        ("d.json", json.dumps(ROWS).encode()),
        ("d.json", json.dumps(ROWS, indent=2).encode()),
        ("lines.json", LINES),
        ("d.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("d.jsonl.bz2", bz2.compress(LINES)),
        ("d.jsonl.xz", lzma.compress(LINES)),
        ("d.jsonl.zst", pyarrow.compress(LINES, codec="zstd", asbytes=True)),
        ("d.csv.gz", gzip.compress(b'question,answer\n1 + 1?,two\n"2, or 3?",three\n', mtime=0)),
        ("d.csv", b'\xef\xbb\xbfquestion,answer\r\n1 + 1?,two\r\n\r\n"2, or 3?",three'),
        ("d.json", b"\xef\xbb\xbf\n " + json.dumps(ROWS).encode()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_and_places(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    rows = read(tmp_path / name)
    assert [row.values for row in rows] == ROWS
    between = ":" if ".jsonl" in name or content == LINES else " row "
    assert [row.place for row in rows] == [f"{tmp_path / name}{between}1", f"{tmp_path / name}{between}2"]
    assert [row.values for row in read(tmp_path / name, offset=1)] == ROWS[1:]


def test_messages_of_a_json_array_are_lists_of_objects(tmp_path):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    (tmp_path / "d.json").write_text(json.dumps([{"messages": messages}]))
    assert read(tmp_path / "d.json")[0].values == {"messages": messages}


CELLS = ["7", "007", "1.50", "1e5", "null", "NA", "None", "True", "2024-01-01", "", '"quoted"', "a\nb", " x "]


@pytest.mark.parametrize("name", ["d.csv", "d.tsv"])
def test_a_cell_is_the_text_that_it_has_whatever_the_others_have(tmp_path, name):
    """A guess by column makes 7.0 of 7 where another answer has a decimal point, and nothing of the answer null."""
    with (tmp_path / name).open("w", newline="") as file:
        csv.writer(file, delimiter="," if name == "d.csv" else "\t").writerows(
            [["answer", "x"], *([c, 1] for c in CELLS)]
        )
    assert [row.values["answer"] for row in read(tmp_path / name)] == [cell or None for cell in CELLS]


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.json"])
def test_a_value_of_json_is_the_same_in_every_file(tmp_path, name):
    values = [7, "x", 2.5, "2024-01-01", 2**70, {"a": 1}, {"b": [1, "y"]}, None]
    rows = [{"answer": value} for value in values] + [{"other": True}]
    text = json.dumps(rows) if name == "d.json" else "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert [row.values for row in read(tmp_path / name)] == rows


def test_a_number_that_json_does_not_have_is_null(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"answer": NaN, "x": [-Infinity]}\n')
    assert read(tmp_path / "d.jsonl")[0].values == {"answer": None, "x": [None]}


@pytest.mark.parametrize("name", ["d.jsonl", "d.json"])
def test_half_a_character_is_named_with_its_row(tmp_path, name):
    """A tokenizer would raise TypeError for it, in the middle of a run."""
    whole, half = r'{"a": "\ud83d\ude00", "b": "\\ud83d"}', r'{"a": {"b": ["x \uDE00 y"]}}'
    text = {"d.jsonl": f"{whole}\n{half}\n", "d.json": f"[{whole}, {half}]"}[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=r"d.json(l:| row )2: has \\ude00, half of a character; write the whole one"):
        read(tmp_path / name)
    assert read(tmp_path / name, limit=1)[0].values == {"a": "😀", "b": r"\ud83d"}


def test_a_short_line_of_csv_has_no_value(tmp_path):
    (tmp_path / "d.csv").write_text(",a,b\n0,1\n")
    assert read(tmp_path / "d.csv")[0].values == {"Unnamed: 0": "0", "a": "1", "b": None}


def test_a_cell_may_be_long(tmp_path):
    (tmp_path / "d.csv").write_text(f"a\n{'x' * 200_000}\n")
    assert len(read(tmp_path / "d.csv")[0].values["a"]) == 200_000


def test_a_glob_is_read_in_the_order_of_the_names(tmp_path):
    for folder, name, x in (("a", "2", 2), ("a", "1", 1), ("b", "1", 3)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"part-{name}.jsonl").write_text(json.dumps({"x": x}) + "\n")
    (tmp_path / "a" / "part-3.txt").write_text("no data")
    assert [row.values["x"] for row in read(tmp_path / "**" / "*.jsonl")] == [1, 2, 3]
    assert [row.values["x"] for row in read(tmp_path / "a" / "part-?.jsonl")] == [1, 2]
    with pytest.raises(InputError, match=r"no file matches .*x-\*.jsonl"):
        read(tmp_path / "x-*.jsonl")
    with pytest.raises(InputError, match=r"for those below, write .*/\*\*/\*.parquet"):
        read(tmp_path)


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    (tmp_path / "d[1].jsonl").write_bytes(LINES)
    assert len(read(tmp_path / "d[1].jsonl")) == 2


def test_a_folder_has_one_kind_of_data(tmp_path):
    for name in ("b.csv", "a.csv", ".hidden.json", "README.md"):
        (tmp_path / name).write_text("x\n1\n")
    assert [path.name for path in find_files(tmp_path)] == ["a.csv", "b.csv"]
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(UserError, match=r"has .csv, .json files; name those to use, as .*/\*.csv does"):
        find_files(tmp_path)
    (tmp_path / "d.jsonl").write_bytes(LINES)
    assert [path.name for path in find_files(tmp_path)] == ["d.jsonl"], "the others may describe it"


def test_a_saved_dataset_is_read_by_its_split(tmp_path):
    import datasets

    both = datasets.DatasetDict({split: datasets.Dataset.from_list(ROWS[i:]) for i, split in enumerate(("train", "x"))})
    both["train"].save_to_disk(tmp_path / "one")
    both.save_to_disk(tmp_path / "both")
    for name in ("one", "both"):
        assert [row.values for row in read(tmp_path / name)] == ROWS
    assert (list_splits(tmp_path / "one"), list_splits(tmp_path / "both")) == ([], ["train", "x"])
    assert [row.values for row in read(tmp_path / "both", lane="test", split="x")] == ROWS[1:]
    with pytest.raises(InputError, match="has no split test; it has train, x: set split"):
        read(tmp_path / "both", lane="test")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.json", b'[{"a": 1}, ', "d.json is not readable as .json: "),
        ("d.json", b'[{"a": 1}, 5]', "d.json row 2: each entry must be a JSON object, got int"),
        ("d.json", b'{"a": 1}\n{\n', "d.json:2: not JSON: "),
        ("d.json", b'{"version": 1, "data": [{"a": 1}]}', "d.json:1: is one object; save its data alone, as an array"),
        ("d.json", b'{"a": ["b", "c"], "d": [1, 2]}', "d.json:1: is one object; save its data alone, as an array"),
        ("d.jsonl", b"<!doctype html>", "d.jsonl:1: is a web page; download the file itself"),
        (
            "d.jsonl",
            b"version https://git-lfs.github.com/spec/v1\n",
            "d.jsonl:1: is a pointer of Git LFS; run `git",
        ),
        ("d.csv", b"question;answer\na;b\n", "d.csv:1: is separated by semicolons; save it with commas"),
        (
            "d.csv",
            b"a,b\n1,2\n3,4,5\n",
            "d.csv:3: has 3 values for the 2 columns of the first line; put a value with com",
        ),
        ("d.csv", b'a,b\n1,2\n"3,4\n5,6\n', "d.csv:4: is not readable as .csv: unexpected end of data; write a quote"),
        ("d.csv", b"a,b,a\n1,2,3\n", "d.csv:1: has 2 columns a; rename all but one"),
        ("d.csv", "a\né\n".encode("latin-1"), "d.csv:2: is not UTF-8 text .*; save it as .csv in UTF-8"),
        ("d.csv", "a\nb\n".encode("utf-16"), "d.csv:1: is UTF-16 text; save it as UTF-8"),
        ("d.csv", gzip.compress(b"a\nb\n", mtime=0), "d.csv:1: is compressed with gzip; name it .csv.gz"),
        ("d.jsonl.xz", b"no xz", "d.jsonl.xz is not readable as .jsonl: "),
        ("d.jsonl.zst", b"no zstandard", "d.jsonl.zst is not readable as .jsonl: "),
        ("d.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "d.jsonl.gz is not readable as .jsonl: "),
        ("d.jsonl.gz", b"no gzip", "d.jsonl.gz is not readable as .jsonl: "),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        read(tmp_path / name)
    assert raised.value.path == "spec.data.train.source"
    assert "\n" not in raised.value.message


def test_two_threads_may_read_at_once(tmp_path):
    """`rljob validate` reads train and eval concurrently."""
    paths = [tmp_path / f"{index}.csv" for index in range(16)]
    for path in paths:
        path.write_bytes(b"x\n1\n")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(read, paths))
    assert [[row.values["x"] for row in rows] for rows in found] == [["1"]] * 16
