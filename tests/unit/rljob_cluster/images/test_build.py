"""What an image is made of, when it is rebuilt, and with which command."""

from pathlib import Path

import pytest

from rljob_cluster import images
from tests.paths import ROOT


@pytest.mark.parametrize("name", images.FOLDERS)
def test_an_image_depends_on_the_lock_file_its_dockerfile_and_its_sources_alone(name: str) -> None:
    paths = {str(path.relative_to(ROOT)) for path in images.input_files(ROOT, name)}
    folder = images.FOLDERS[name]
    assert {"uv.lock", f"{folder}/Dockerfile", "api/rljob_api/__init__.py"} <= paths
    others = {other for other in images.FOLDERS.values() if other != folder}
    assert not [p for p in paths if p.endswith(".py") and p.split("/")[0] in others], "another image's sources"


def test_one_changed_byte_or_another_extra_gives_another_digest(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text("one")
    first = images.digest_inputs(tmp_path, [source], ("base", "cpu"))
    assert images.digest_inputs(tmp_path, [source], ("base", "gpu")) != first
    assert images.digest_inputs(tmp_path, [source], ("base", "cpu")) == first
    source.write_text("two")
    assert images.digest_inputs(tmp_path, [source], ("base", "cpu")) != first


def test_only_the_trainer_takes_an_extra() -> None:
    assert "EXTRA=gpu" in images.build_command("docker", "trainer", "b", "gpu", "d", None)
    assert "EXTRA=gpu" not in images.build_command("docker", "reward", "b", "gpu", "d", None)


def test_a_local_base_is_never_asked_of_a_registry() -> None:
    assert "--pull-never" in images.build_command("buildah", "reward", "localhost/base", "cpu", "d", None)
    assert "--pull-never" not in images.build_command("buildah", "reward", "python:3.11", "cpu", "d", None)


def test_a_tool_that_is_neither_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINER_TOOL", "podman")
    with pytest.raises(images.ImageBuildError, match="must be buildah or docker, got 'podman'; install buildah"):
        images.choose_tool()
