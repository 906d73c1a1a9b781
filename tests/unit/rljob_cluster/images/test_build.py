"""What an image is built from, when it is rebuilt, and with which command."""

from pathlib import Path

import pytest

from rljob_cluster.images import __main__ as images
from rljob_cluster.images import build
from rljob_cluster.images.base_image import LOCAL_BASE, NoBaseError, hub_name
from rljob_cluster.images.tools import Buildah, Docker, ImageInfo, _megabytes
from rljob_core.defaults import DEFAULTS
from tests.paths import ROOT


@pytest.mark.parametrize("name", build.FOLDERS)
def test_image_depends_on_lock_file_dockerfile_and_its_own_sources_only(name: str) -> None:
    paths = {str(path.relative_to(ROOT)) for path in build.list_inputs(ROOT, name)}
    folder = build.FOLDERS[name]
    assert {"uv.lock", f"{folder}/Dockerfile", "api/rljob_api/__init__.py"} <= paths
    others = {other for other in build.FOLDERS.values() if other != folder}
    assert not [p for p in paths if p.endswith(".py") and p.split("/")[0] in others], "another image's sources"


def test_digest_changes_with_one_byte_or_another_extra(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text("one")
    first = build.digest_inputs(tmp_path, [source], ("base", "cpu"))
    assert build.digest_inputs(tmp_path, [source], ("base", "gpu")) != first
    assert build.digest_inputs(tmp_path, [source], ("base", "cpu")) == first
    source.write_text("two")
    assert build.digest_inputs(tmp_path, [source], ("base", "cpu")) != first


def test_only_the_trainer_takes_an_extra() -> None:
    assert "EXTRA=gpu" in build.build_command(Docker(), "trainer", "b", "gpu", "d", None)
    assert "EXTRA=gpu" not in build.build_command(Docker(), "reward", "b", "gpu", "d", None)


def test_image_of_another_python_has_its_own_base_and_refuses_one_without_it() -> None:
    assert "PYTHON=3.12" in build.build_command(Docker(), "reward-py312", "b", "cpu", "d", None)
    assert "PYTHON=3.12" not in build.build_command(Docker(), "reward", "b", "cpu", "d", None)
    assert (Docker().find_base("3.12"), Docker().find_base()) == (hub_name("3.12"), hub_name())
    assert build.image_name("reward-py312") == DEFAULTS.python_images["3.12"], "what is built is what jobs use"


def test_base_of_another_python_has_its_own_variable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_IMAGE", "mirror/python:3.11")
    monkeypatch.setenv("BASE_IMAGE_PY312", "mirror/python:3.12")
    inputs = build.list_inputs(ROOT, "reward-py312")
    digest = build.digest_inputs(ROOT, inputs, ("mirror/python:3.12", "cpu", "3.12"))
    assert build.build_image(ROOT, "reward-py312", FakeTool(ImageInfo(digest, 60)), archive="no").reused


def test_only_a_named_image_needs_its_base(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def build_image(root: Path, name: str, **_: object) -> build.BuildResult:
        if name == "reward-py312":
            raise NoBaseError("cannot pull python:3.12-slim-bookworm; set BASE_IMAGE_PY312")
        return build.BuildResult(name, "d", 1, 0.0, False, None)

    monkeypatch.setattr(images, "choose_tool", lambda: Docker())
    monkeypatch.setattr(images, "build_image", build_image)
    assert images.main([]) == 0
    output = capsys.readouterr()
    assert "reward-py312 is left out: cannot pull" in output.err
    assert "operator" in output.out
    assert images.main(["reward-py312"]) == 1


def test_local_base_is_never_pulled() -> None:
    assert "--pull-never" in build.build_command(Buildah(), "reward", LOCAL_BASE, "cpu", "d", None)
    assert "--pull-never" not in build.build_command(Buildah(), "reward", "python:3.11", "cpu", "d", None)


def test_buildah_gets_the_runtime_and_the_uv_cache_of_the_host() -> None:
    command = build.build_command(Buildah("runc"), "reward", "b", "cpu", "d", Path("/cache/uv"))
    assert command[command.index("--runtime") + 1] == "runc"
    assert "/cache/uv:/var/cache/host-uv" in command
    assert "--runtime" not in build.build_command(Buildah(), "reward", "b", "cpu", "d", None)


@pytest.mark.parametrize(("text", "megabytes"), [("512 KB", 1), ("64.4 MB", 64), ("7.5 GB", 7500)])
def test_sizes_are_read_in_megabytes(text: str, megabytes: int) -> None:
    assert _megabytes(text) == megabytes


def test_dependency_layer_does_not_depend_on_sources() -> None:
    for folder in build.FOLDERS.values():
        steps = (ROOT / folder / "Dockerfile").read_text().split("FROM ${BASE_IMAGE}")[2]
        dependencies = steps.index("uv pip install --quiet --no-deps --require-hashes")
        assert "COPY api" not in steps[:dependencies], "a changed source would rebuild the dependencies"
        assert steps.index(f"COPY {folder} {folder}") > dependencies


class FakeTool(Docker):
    """Keeps the label of the image that was built last."""

    def __init__(self, image: ImageInfo | None) -> None:
        self.image = image
        self.saved: list[Path] = []

    def find_base(self, python: str | None = None) -> str:
        return "base"

    def inspect(self, image: str) -> ImageInfo | None:
        return self.image

    def save(self, image: str, archive: Path) -> None:
        self.saved.append(archive)
        archive.write_text(image)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build.subprocess, "run", lambda *arguments, **_: pytest.fail(f"ran {arguments}"))
    return tmp_path / "rljob/cluster/images"


def current_digest(name: str) -> str:
    return build.digest_inputs(ROOT, build.list_inputs(ROOT, name), ("base", "cpu"))


def test_image_with_the_same_inputs_is_reused(cache: Path) -> None:
    tool = FakeTool(ImageInfo(current_digest("operator"), 60))
    result = build.build_image(ROOT, "operator", tool, archive="no")
    assert (result.reused, result.size_mb, result.archive) == (True, 60, None)


def test_new_archive_replaces_the_older_one_and_is_reused(cache: Path) -> None:
    tool = FakeTool(ImageInfo(current_digest("operator"), 60))
    cache.mkdir(parents=True)
    (cache / "operator-older.tar").touch()
    (cache / "reward-older.tar").touch()
    (cache / "operator-other-older.tar").touch()
    result = build.build_image(ROOT, "operator", tool, archive="needed")
    assert build.build_image(ROOT, "operator", tool, archive="yes").archive == result.archive
    others = ["operator-other-older.tar", "reward-older.tar"]
    assert sorted(path.name for path in cache.iterdir()) == sorted([f"operator-{result.digest}.tar", *others])
    assert len(tool.saved) == 1
