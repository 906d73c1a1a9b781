"""Rows from files: order, places, limits, and what is not a dataset."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from rljob_api.errors import TransientError
from rljob_api.manifest.job_sections import DataSource
from rljob_inputs.data.rows import read_rows
from rljob_inputs.findings import InputError
from rljob_inputs.hub import HubAccess
from tests.support.hub import run_hub


def read(path, **fields):
    return list(read_rows(DataSource(source="./d", **fields), str(path), split="train"))


def test_rows_have_positions_and_places(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n{"x": 2}\n')
    pyarrow.parquet.write_table(pyarrow.table({"x": [3, 4]}), tmp_path / "b.parquet")
    rows = read(tmp_path)
    assert [row.values["x"] for row in rows] == [1, 2, 3, 4]
    assert [row.position for row in rows] == [0, 1, 2, 3]
    assert [row.place.removeprefix(f"{tmp_path}/") for row in rows] == [
        "a.jsonl:1", "a.jsonl:3", "b.parquet row 1", "b.parquet row 2",
    ]  # fmt: skip
    assert [row.values["x"] for row in read(tmp_path, limit=3)] == [1, 2, 3]
    rest = read(tmp_path, limit=2, offset=1)
    assert [(row.values["x"], row.position) for row in rest] == [(2, 0), (3, 1)]
    assert rest[0].place.endswith("a.jsonl:3")


def test_a_byte_order_mark_is_accepted(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text('{"x": 1}\n', encoding="utf-8-sig")
    assert [row.values for row in read(file)] == [{"x": 1}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{', r"d.jsonl:2: not JSON: .*; each line must be one JSON object"),
        (b"[1]", r"d.jsonl:1: each line must be a JSON object, got list"),
        (b"[" * 100_000, r"d.jsonl:1: not JSON"),
        ('{"a": "é"}'.encode("latin-1"), r"d.jsonl:1: is not UTF-8 text \(byte 0xe9\); save it as JSON lines in UTF-8"),
        ('{"a": 1}\n'.encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
        (gzip.compress(b'{"a": 1}', mtime=0), "is compressed with gzip; name it .jsonl.gz"),
        (b"\x89PNG\r\n\x1a\n\xff", "is not UTF-8 text"),
    ],
    ids=["cut", "list", "deep", "latin-1", "utf-16", "gzip", "png"],
)
def test_what_is_not_json_lines_is_named(tmp_path, content, message):
    file = tmp_path / "d.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        read(file)
    assert raised.value.path == "spec.data.train.source"


def test_what_is_not_a_dataset_is_named(tmp_path):
    with pytest.raises(InputError, match="no not found"):
        read(tmp_path / "no")
    with pytest.raises(InputError, match=r"has no data: a .jsonl, .parquet, .json, .csv or .tsv file$"):
        read(tmp_path)
    (tmp_path / "d.txt").write_text("a,b\n")
    with pytest.raises(InputError, match=r"must be a .jsonl, .* or .tsv file, also compressed as .gz, got .txt"):
        read(tmp_path / "d.txt")
    (tmp_path / "d.parquet").write_text(json.dumps({"a": 1}))
    with pytest.raises(InputError, match="is not a readable Parquet file"):
        read(tmp_path / "d.parquet")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", datasets.config.HF_ENDPOINT)
    with run_hub(tmp_path / "hub") as running:
        folder = running.add("datasets/org/data")
        (folder / "README.md").write_text(
            "---\nconfigs: [{config_name: a, data_files: a.jsonl}, {config_name: b, data_files: b.jsonl}]\n---\n"
        )
        for name in "ab":
            (folder / f"{name}.jsonl").write_text(f'{{"x": "{name}1"}}\n{{"x": "{name}2"}}\n')
        yield running


def read_hub(access, *, is_check=False, **fields):
    source = DataSource(source="hf://org/data", **fields)
    return [
        (row.values["x"], row.place)
        for row in read_rows(source, source.source, split="train", access=access, is_check=is_check)
    ]


@pytest.mark.parametrize("is_check", [True, False])
def test_dataset_of_the_hub_is_read_by_subset_and_limit(hub, is_check):
    access = HubAccess(hub.url)
    expected = [("b1", "hf://org/data row 1"), ("b2", "hf://org/data row 2")]
    assert read_hub(access, is_check=is_check, subset="b") == expected
    assert read_hub(access, is_check=is_check, subset="b", limit=1, offset=1) == expected[1:]
    with pytest.raises(InputError, match=r"spec.data.train.subset: hf://org/data has several subsets: .*'a', 'b'"):
        read_hub(access, is_check=is_check)
    with pytest.raises(InputError, match=r"spec.data.train.subset: hf://org/data has no subset c: .*'a', 'b'"):
        read_hub(access, is_check=is_check, subset="c")
    with pytest.raises(InputError, match=r"spec.data.train.split: hf://org/data has no split x"):
        read_hub(access, is_check=is_check, subset="b", split="x")


def test_dataset_in_the_cache_is_read_without_a_network_and_without_retries(hub, monkeypatch):
    import huggingface_hub

    rows = read_hub(HubAccess(hub.url), subset="a")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: pytest.fail("it retries"))
    nowhere = HubAccess("http://127.0.0.1:1")
    for is_check in (True, False):
        assert read_hub(nowhere, is_check=is_check, subset="a") == rows
    assert not huggingface_hub.constants.HF_HUB_OFFLINE, "other repositories may be reachable"
    with pytest.raises(TransientError, match="cannot reach the Hub"):
        list(read_rows(DataSource(source="hf://org/other"), "hf://org/other", split="train", access=nowhere))
