"""Object storage against an S3 server: listings, copies, uploads, and one line for what is refused."""

import json

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.job_sections import DataSource
from rljob_inputs.data.rows import read_rows
from rljob_inputs.findings import InputError
from rljob_inputs.hub import HubAccess
from rljob_inputs.machine.installation import MissingExtraError
from rljob_inputs.models.files import open_model, place_model
from rljob_inputs.objects.access import ObjectAccess, is_object, pin, split_pin
from rljob_inputs.objects.copies import Copy
from rljob_inputs.objects.errors import (
    ChangedObjectsError,
    CopyError,
    MissingObjectError,
    RefusedObjectError,
    StorageAwayError,
    explain,
)
from rljob_inputs.objects.folder import require_empty, upload_folder
from rljob_inputs.objects.listing import list_objects
from tests.support.model_folder import write_model
from tests.support.objects import BUCKET, run_objects


@pytest.fixture(scope="module")
def server():
    with run_objects() as running:
        yield running


@pytest.fixture(autouse=True)
def machine(server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def access(server):
    return ObjectAccess.from_environment(server.environment())


def rows_of(url, access, **fields):
    source = DataSource(source=split_pin(url)[0], **fields)
    return list(read_rows(source, url, split="train", access=HubAccess(objects=access)))


def lines(*questions):
    return "".join(json.dumps({"prompt": each}) + "\n" for each in questions).encode()


def test_listing_names_objects_below_a_prefix_at_a_key_and_of_a_glob(server, access):
    for key in ("list/a.jsonl", "list/b.csv", "list/deep/c.jsonl"):
        server.put(key, b"{}")
    names = {
        url: list(list_objects(f"s3://{BUCKET}/{url}", access).objects)
        for url in ("list", "list/", "list/a.jsonl", "list/*.jsonl", "list/**/*.jsonl")
    }
    assert names == {
        "list": ["a.jsonl", "b.csv", "deep/c.jsonl"],
        "list/": ["a.jsonl", "b.csv", "deep/c.jsonl"],
        "list/a.jsonl": ["a.jsonl"],
        "list/*.jsonl": ["a.jsonl"],
        "list/**/*.jsonl": ["a.jsonl", "deep/c.jsonl"],
    }


@pytest.mark.parametrize("name", ["a b+c.jsonl", "ü#1.jsonl", "[v2].jsonl", "v[2]/q?x*.jsonl", "p%20q&b=c;.jsonl"])
def test_key_may_have_any_character(server, access, name):
    server.put(f"any/{name}", lines("a"))
    [row] = rows_of(f"s3://{BUCKET}/any/{name}", access)
    assert row.place == f"s3://{BUCKET}/any/{name}:1"


def test_pinned_location_is_one_version_for_all_who_read_it(server, access, tmp_path, monkeypatch):
    """Head, ranks and rollouts: each has its own machine, and a rank may start long after the head."""
    url = f"s3://{BUCKET}/pinned"
    server.put("pinned/config.json", b'{"a": 1}')
    server.put("pinned/model.safetensors", b"weights")
    location = pin(url, list_objects(url, access).digest)
    assert split_pin(location) == (url, list_objects(url, access).digest)
    assert is_object(location)
    assert open_model(location, None, HubAccess(objects=access)).place == url, "messages name what the user wrote"
    folder = place_model(location, weights=False)

    server.put("pinned/config.json", b'{"a": 2}')
    assert place_model(location, weights=False) == folder
    assert open_model(location, None, HubAccess(objects=access)).read_json("config.json") == {"a": 1}
    assert open_model(url, None, HubAccess(objects=access)).read_json("config.json") == {"a": 2}
    server.put("pinned/model.safetensors", b"other weights")
    with pytest.raises(ChangedObjectsError, match=r"model\.safetensors changed after the run began"):
        place_model(location)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other machine"))
    with pytest.raises(ChangedObjectsError, match=f"{url} changed after the run began, and this machine has no copy"):
        place_model(location, weights=False)


def test_pinned_rows_are_those_that_the_head_found(server, access):
    server.put("pinned-rows/a.jsonl", lines("a"))
    url = f"s3://{BUCKET}/pinned-rows/a.jsonl"
    location = pin(url, list_objects(url, access).digest)
    assert [row.place for row in rows_of(location, access)] == [f"{url}:1"]
    server.put("pinned-rows/a.jsonl", lines("a", "b"))
    assert len(rows_of(location, access)) == 1
    assert len(rows_of(url, access)) == 2


def test_copy_is_downloaded_once_and_a_new_version_is_another_copy(server, access):
    url, said = f"s3://{BUCKET}/once/rows.jsonl", []
    server.put("once/rows.jsonl", b"first")
    first = Copy.of(list_objects(url, access), said.append)
    assert first.fetch("rows.jsonl").read_bytes() == b"first"
    assert first.fetch("rows.jsonl").read_bytes() == b"first"
    assert said == [f"downloads {url}: 1 files, 5 B"]
    server.put("once/rows.jsonl", b"other")
    assert Copy.of(list_objects(url, access)).fetch("rows.jsonl").read_bytes() == b"other"
    assert first.fetch("rows.jsonl").read_bytes() == b"first"


def test_object_that_changes_after_its_listing_is_not_kept(server, access):
    server.put("race/rows.jsonl", b"first")
    copy = Copy.of(list_objects(f"s3://{BUCKET}/race/rows.jsonl", access))
    server.put("race/rows.jsonl", b"other")
    with pytest.raises(StorageAwayError, match="has changed while it was read"):
        copy.fetch("rows.jsonl")
    assert not (copy.folder / "rows.jsonl").exists()


def test_key_that_leaves_the_folder_is_refused(server, access, tmp_path):
    server.put("evil/../../../outside", b"x")
    with pytest.raises(UserError, match="is no path below"):
        Copy.of(list_objects(f"s3://{BUCKET}/evil", access)).fetch_all()
    assert not list(tmp_path.rglob("outside"))


def test_full_disk_and_unwritable_cache_are_no_outage_of_the_storage(server, access, tmp_path, monkeypatch):
    server.put("disk/sub/rows.jsonl", b"{}")
    copy = Copy.of(list_objects(f"s3://{BUCKET}/disk", access))
    (copy.folder / "sub").mkdir(parents=True)
    (copy.folder / "sub" / "rows.jsonl.partial").symlink_to("/dev/full")
    remedy = r"cannot be written to \S+/objects \(.*\); free space, or set XDG_CACHE_HOME"
    with pytest.raises(CopyError, match=f"No space left on device.*{remedy[-20:]}"):
        copy.fetch_all()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CopyError, match=remedy):
        Copy.of(copy.listing).fetch_all()
    (copy.folder / "sub" / "rows.jsonl.partial").unlink()
    (copy.folder / "sub").rmdir()
    (copy.folder / "sub").write_text("as of an object with this name")
    with pytest.raises(CopyError, match=remedy):
        copy.fetch_all()


def test_rows_have_the_places_of_their_objects(server, access):
    server.put("data/1.jsonl", lines("a", "b"))
    server.put("data/2.jsonl", lines("c"))
    server.put("data/notes.txt", b"no data")
    found = rows_of(f"s3://{BUCKET}/data", access)
    assert [row.values["prompt"] for row in found] == ["a", "b", "c"]
    assert [row.place for row in found] == [
        f"s3://{BUCKET}/data/{name}" for name in ("1.jsonl:1", "1.jsonl:2", "2.jsonl:1")
    ]


def test_rows_that_are_not_read_are_not_downloaded(server, access, tmp_path):
    server.put("lazy/1.jsonl", lines("a"))
    server.put("lazy/2.jsonl", lines("b"))
    assert len(rows_of(f"s3://{BUCKET}/lazy/*.jsonl", access, limit=1)) == 1
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["1.jsonl"]


def test_broken_row_is_named_by_its_object(server, access):
    server.put("broken/rows.jsonl", b"{}\nnot json\n")
    with pytest.raises(InputError) as raised:
        rows_of(f"s3://{BUCKET}/broken/rows.jsonl", access)
    assert str(raised.value).startswith(f"spec.data.train.source: s3://{BUCKET}/broken/rows.jsonl:2")


def test_model_has_its_sizes_and_small_files_without_its_weights(server, access, tmp_path):
    folder = write_model(tmp_path / "model")
    server.put_folder("model", folder)
    files = open_model(f"s3://{BUCKET}/model", None, HubAccess(objects=access))
    assert files.read_json("config.json")["model_type"] == "qwen3"
    assert files.sizes["model.safetensors"] == (folder / "model.safetensors").stat().st_size
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_model_is_placed_with_its_weights_where_they_are_needed(server, tmp_path):
    folder = write_model(tmp_path / "model")
    server.put_folder("placed", folder)
    small = place_model(f"s3://{BUCKET}/placed", weights=False)
    assert (tmp_path / "cache") in (path := tmp_path.joinpath(small)).parents
    assert (path / "config.json").is_file()
    assert not (path / "model.safetensors").exists()
    assert place_model(f"s3://{BUCKET}/placed") == small
    assert (path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert place_model("hf://org/name") == "org/name"
    assert place_model("/models/mine") == "/models/mine"


def test_missing_bucket_and_key_are_named(access):
    with pytest.raises(MissingObjectError, match="the bucket none does not exist at http"):
        list_objects("s3://none/model", access)
    with pytest.raises(MissingObjectError, match=rf"the bucket {BUCKET} at http\S+ has no object nothing/here;"):
        list_objects(f"s3://{BUCKET}/nothing/here", access)


def test_missing_right_is_named_with_bucket_and_key(server):
    server.put("rights/rows.jsonl", b"{}")
    url = f"s3://{BUCKET}/rights/rows.jsonl"
    with server.only_with("s3:PutObject") as variables:
        user = ObjectAccess.from_environment(variables)
        with pytest.raises(RefusedObjectError) as raised:
            list_objects(url, user)
    assert f"{url}: the key {user.key} lacks s3:ListBucket on the bucket {BUCKET}; grant it" in str(raised.value)
    with server.only_with("s3:ListBucket") as variables:
        copy = Copy.of(list_objects(f"s3://{BUCKET}/rights", ObjectAccess.from_environment(variables)))
        with pytest.raises(RefusedObjectError, match=rf"{url}: the key \w+ lacks s3:GetObject on the bucket {BUCKET}"):
            copy.fetch("rows.jsonl")


def test_upload_needs_its_right_and_writes_the_mark_of_a_whole_folder_last(server, access, tmp_path):
    folder = tmp_path / "model"
    (folder / "adapter").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "adapter/weights"):
        (folder / name).write_text(name)
    order = []
    url = f"s3://{BUCKET}/out/model/"
    with server.only_with("s3:ListBucket") as variables, pytest.raises(RefusedObjectError, match="lacks s3:PutObject"):
        upload_folder(folder, url, ObjectAccess.from_environment(variables))
    assert server.keys("out/") == []
    upload_folder(folder, url, access, last=["config.json"], wrote=order.append)
    assert order[-1] == "config.json"
    assert sorted(server.keys("out/")) == [f"out/model/{name}" for name in sorted(order)]
    assert server.read("out/model/adapter/weights") == b"adapter/weights"
    with pytest.raises(UserError, match="exists; choose a new prefix"):
        require_empty(url, access)
    require_empty(f"s3://{BUCKET}/out/mod", access)


def test_wrong_credentials_and_none_at_all_name_the_remedy(server, monkeypatch):
    with server.only_with(), pytest.raises(RefusedObjectError, match=r"refuses the key wrong \(InvalidAccessKeyId\)"):
        list_objects(f"s3://{BUCKET}/x", ObjectAccess.from_environment(server.environment("wrong", "secret")))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(RefusedObjectError, match=r"no credentials were found; set spec\.objectStorage\.secretRef"):
        list_objects(f"s3://{BUCKET}/x", ObjectAccess(server.url))


def test_storage_that_does_not_answer_may_come_back():
    with pytest.raises(StorageAwayError, match=r"cannot reach the object storage at http://127\.0\.0\.1:9 "):
        list_objects(f"s3://{BUCKET}/x", ObjectAccess("http://127.0.0.1:9", None, "key", "secret"))


def test_no_secret_of_an_address_is_in_a_message():
    access = ObjectAccess("http://bob:hunter2@127.0.0.1:9", None, "key", "secret")
    error = OSError("Cannot connect: https://s.example/x?X-Amz-Signature=ab12cd34&sig=ef56")
    for message in (str(explain(error, "s3://b/x", "s3:GetObject", access)), access.place):
        assert not [each for each in ("hunter2", "ab12cd34", "ef56") if each in message]


def test_program_without_the_client_names_what_brings_it(access, monkeypatch):
    """The images have no other part of the extra, such as the service, so its client alone counts."""
    absent = {"rljob_service"}
    monkeypatch.setattr("rljob_inputs.objects.access.has_module", lambda name: name not in absent)
    with pytest.raises(MissingObjectError):
        list_objects(f"s3://{BUCKET}/nothing", access)
    absent.add("s3fs")
    with pytest.raises(MissingExtraError, match="s3://bucket/nothing needs the package s3fs; run `"):
        list_objects(f"s3://{BUCKET}/nothing", access)


def test_storage_of_others_names_its_package(access):
    with pytest.raises(UserError, match="gs://b/x: needs the package gcsfs"):
        list_objects("gs://b/x", access)
