import base64
import hashlib
import json
from pathlib import Path

import pytest

from rljob_cluster.images import buildah_store
from rljob_cluster.images.buildah_store import find_image

LAYERS = ["sha256:lower", "sha256:upper"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store as containers/storage writes it, with one image of two layers."""
    config = json.dumps({"rootfs": {"type": "layers", "diff_ids": LAYERS}}).encode()
    id_ = hashlib.sha256(config).hexdigest()
    folder = tmp_path / "overlay-images" / id_
    folder.mkdir(parents=True)
    (folder / ("=" + base64.b64encode(f"sha256:{id_}".encode()).decode())).write_bytes(config)
    images = [{"id": "base"}, {"id": id_, "names": ["localhost/rljob/reward:0.1.0"], "layer": "l2"}]
    (tmp_path / "overlay-images/images.json").write_text(json.dumps(images))
    write_layers(tmp_path, LAYERS)
    monkeypatch.setattr(buildah_store, "_find_root", lambda: tmp_path)
    return tmp_path


def write_layers(root: Path, diff_ids: list[str]) -> None:
    lower = {"id": "l1", "diff-digest": diff_ids[0], "diff-size": 10}
    upper = {"id": "l2", "parent": "l1", "diff-digest": diff_ids[1], "diff-size": 20}
    (root / "overlay-layers").mkdir(exist_ok=True)
    (root / "overlay-layers/layers.json").write_text(json.dumps([upper, lower]))


def test_image_is_found_with_its_layers_from_the_lowest(store: Path) -> None:
    found = find_image("rljob/reward:0.1.0", store)
    assert found
    assert found.image.names == ["docker.io/rljob/reward:0.1.0"]
    assert [(layer.diff_id, layer.size) for layer in found.image.layers] == [(LAYERS[0], 10), (LAYERS[1], 20)]
    assert [folder.relative_to(store).as_posix() for folder in found.folders] == ["overlay/l1/diff", "overlay/l2/diff"]


def test_image_is_not_linked_when_stored_layers_differ_from_its_config(store: Path) -> None:
    write_layers(store, ["sha256:lower", "sha256:another"])
    assert find_image("rljob/reward:0.1.0", store) is None


def test_missing_image_and_another_disk_have_no_links(store: Path) -> None:
    assert find_image("rljob/trainer:0.1.0", store) is None
    assert find_image("rljob/reward:0.1.0", Path("/proc")) is None
