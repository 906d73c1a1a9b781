import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from rljob_cluster.images.oci_layout import build_program_image, chain_ids, read_archive, write_layout


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    program = tmp_path / "pause"
    program.write_bytes(b"a program")
    image = build_program_image(program, "rljob.dev/pause:local")
    manifest = [{"Config": "config.json", "RepoTags": image.names, "Layers": ["layer.tar"]}]
    files = {"config.json": image.config, "layer.tar": image.layers[0].open().read()}
    with tarfile.open(tmp_path / "pause.tar", "w") as tar:
        for name, content in (files | {"manifest.json": json.dumps(manifest).encode()}).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return tmp_path / "pause.tar"


def read_slim(archive: Path, unpacked: set[str]) -> dict[str, bytes]:
    stream = io.BytesIO()
    with read_archive(archive) as images:
        write_layout(images, unpacked, stream)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        return {member.name: file.read() for member in tar if (file := tar.extractfile(member))}


def read_manifest(files: dict[str, bytes]) -> dict[str, object]:
    (descriptor,) = json.loads(files["index.json"])["manifests"]
    return dict(json.loads(files[f"blobs/{descriptor['digest'].replace(':', '/')}"]))


def test_complete_layout_names_every_blob_by_the_digest_of_its_content(archive: Path) -> None:
    files = read_slim(archive, set())
    blobs = {name: content for name, content in files.items() if name.startswith("blobs/")}
    assert len(blobs) == 3, "config, manifest and one layer"
    for name, content in blobs.items():
        assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"
    assert json.loads(files["index.json"])["manifests"][0]["annotations"] == {
        "io.containerd.image.name": "rljob.dev/pause:local"
    }


def test_unpacked_layer_is_named_but_not_written(archive: Path) -> None:
    whole = read_slim(archive, set())
    layer = read_manifest(whole)["layers"][0]["digest"]  # type: ignore[index]
    slim = read_slim(archive, {layer})
    assert read_manifest(slim) == read_manifest(whole)
    assert set(whole) - set(slim) == {f"blobs/{layer.replace(':', '/')}"}


def test_snapshot_name_covers_its_layer_and_all_below() -> None:
    # The second is the definition in the OCI specification: sha256("sha256:a sha256:b").
    expected = hashlib.sha256(b"sha256:a sha256:b").hexdigest()
    assert chain_ids(["sha256:a", "sha256:b"]) == ["sha256:a", f"sha256:{expected}"]
    assert chain_ids(["sha256:b", "sha256:a"])[1] != chain_ids(["sha256:a", "sha256:b"])[1]


def test_only_missing_layers_are_new(archive: Path) -> None:
    with read_archive(archive) as (image,):
        (layer,) = image.find_new(set())
        assert layer.size == len(read_slim(archive, set())[f"blobs/{layer.diff_id.replace(':', '/')}"])
        assert image.find_new({layer.diff_id}) == []
