"""Versions of objects: a run that resumes reads those that it began with."""

import pytest

from rljob_api.run.folder import FILE_COMPLETE, checkpoint_folder
from rljob_api.run.origin import FILE_OBJECTS, read_objects
from rljob_inputs.findings import InputError
from rljob_inputs.objects.access import ObjectAccess, split_pin
from rljob_inputs.objects.errors import MissingObjectError
from rljob_inputs.objects.listing import Listing, ObjectFacts
from rljob_trainer.head import origin as objects
from rljob_trainer.head.origin import find_versions

MODEL, DATA = "spec.model.source", "spec.data.train.source"
SOURCES = {MODEL: "/models/tiny", DATA: "s3://b/rows"}


@pytest.fixture
def storage(monkeypatch):
    """Tags by name, of all objects."""
    tags = {"1.jsonl": "a", "2.jsonl": "b"}

    def list_objects(url, access):
        if not tags:
            raise MissingObjectError(f"{url}: no object")
        return Listing(url, url, {name: ObjectFacts(1, tag) for name, tag in tags.items()}, access)

    monkeypatch.setattr(objects, "list_objects", list_objects)
    return tags


def start(run_dir, sources=SOURCES):
    versions = find_versions(run_dir, sources, ObjectAccess())
    if versions is not None:
        versions.write(run_dir)


def checkpoint(run_dir):
    folder = checkpoint_folder(run_dir, 2)
    folder.mkdir(parents=True)
    (folder / FILE_COMPLETE).touch()


def test_versions_are_recorded_by_field_and_object(storage, tmp_path):
    start(tmp_path)
    record = read_objects(tmp_path)
    assert record is not None
    assert record.tags == {DATA: {"s3://b/rows/1.jsonl": "a", "s3://b/rows/2.jsonl": "b"}}


def test_location_names_the_version_that_was_found(storage, tmp_path):
    first = find_versions(tmp_path, SOURCES, ObjectAccess()).pinned
    storage["1.jsonl"] = "new"
    second = find_versions(tmp_path, SOURCES, ObjectAccess()).pinned
    assert first.keys() == second.keys() == {DATA}, "a folder has no version"
    assert {split_pin(each[DATA])[0] for each in (first, second)} == {SOURCES[DATA]}
    assert first != second


def test_run_without_objects_has_no_record(storage, tmp_path):
    start(tmp_path, {MODEL: "hf://org/name", DATA: "env://train"})
    assert not (tmp_path / FILE_OBJECTS).exists()


def test_run_resumes_with_the_same_versions(storage, tmp_path):
    start(tmp_path)
    checkpoint(tmp_path)
    start(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tags: tags.update({"2.jsonl": "new"}), "s3://b/rows/2.jsonl changed"),
        (lambda tags: tags.update({"3.jsonl": "c"}), "s3://b/rows/3.jsonl changed"),
        (lambda tags: tags.pop("1.jsonl"), "s3://b/rows/1.jsonl changed"),
        (lambda tags: tags.clear(), "s3://b/rows: no object"),
    ],
)
def test_run_with_a_checkpoint_refuses_other_versions(storage, tmp_path, change, named):
    start(tmp_path)
    checkpoint(tmp_path)
    change(storage)
    with pytest.raises(InputError, match=rf"{DATA}: {named}"):
        start(tmp_path)


def test_run_that_has_no_checkpoint_begins_again_with_new_versions(storage, tmp_path):
    start(tmp_path)
    storage["1.jsonl"] = "new"
    start(tmp_path)
    assert "new" in (tmp_path / FILE_OBJECTS).read_text()


def test_damaged_record_is_named(storage, tmp_path):
    start(tmp_path)
    checkpoint(tmp_path)
    (tmp_path / FILE_OBJECTS).write_text("{")
    with pytest.raises(InputError, match=r"objects\.json is damaged"):
        start(tmp_path)
