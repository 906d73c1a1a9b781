"""The version stands where the one source says, in the form that each place may have."""

import shutil
from pathlib import Path

import pytest

from dev import versions
from rljob_api import __version__
from rljob_core.defaults import DEFAULTS, image_tag
from tests.paths import ROOT


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of this repository that have the version."""
    for path in versions.find_changes(ROOT, "9.8.7"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def test_every_place_has_the_version_of_the_source() -> None:
    assert versions.find_changes(ROOT, versions.read_version()) == {}, "run `make generate`"
    assert versions.read_version() == __version__


def test_no_place_is_forgotten() -> None:
    """Else a release would name the images of another one."""
    found = {str(path) for path in versions.find_changes(ROOT, "9.8.7")}
    tag, number = image_tag(), versions.read_version()
    here = [p for glob in ("*/pyproject.toml", "charts/**/*", "docs/**/*.md", "e2e/**/*.*", "*/rljob_*/**/*.py")
            for p in ROOT.glob(glob) if p.is_file() and "__pycache__" not in p.parts]  # fmt: skip
    named = {str(p.relative_to(ROOT)) for p in here if any(f"{a}{b}" in p.read_text(errors="ignore") for a, b in
             (("rljob/trainer:", tag), ("rljob/reward:", tag), ("rljob/operator:", tag), ("==", number)))}  # fmt: skip
    assert named <= found


@pytest.mark.parametrize("version", ["0.2.0", "0.2.1.dev0", "0.2.1.dev0+g1a2b3c4"])
def test_a_version_is_written_and_replaced_as_a_whole(tree: Path, version: str) -> None:
    before = {path: (tree / path).read_text() for path in versions.find_changes(tree, "9.8.7")}
    versions.write_version(tree, version)
    assert versions.read_version(tree) == version
    values = (tree / "charts/rljob/values.yaml").read_text()
    assert f"trainerImage: rljob/trainer:{image_tag(version)}\n" in values
    assert f'"rljob-api=={version}"' in (tree / "cli/pyproject.toml").read_text()
    assert versions.find_changes(tree, version) == {}
    versions.write_version(tree, __version__)
    assert {path: (tree / path).read_text() for path in before} == before


@pytest.mark.parametrize(
    ("version", "tag"),
    [("0.2.0", "0.2.0"), ("0.2.1.dev0", "0.2.1-dev"), ("0.2.1.dev0+g1a2b3c4", "0.2.1-dev.g1a2b3c4")],
)
def test_tag_is_valid_for_images_the_chart_and_labels(version: str, tag: str) -> None:
    assert image_tag(version) == tag


def test_default_images_are_of_this_version() -> None:
    assert DEFAULTS.trainer_image == f"rljob/trainer:{image_tag(__version__)}"


def test_another_version_somewhere_fails_the_check(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "ROOT", tree)
    monkeypatch.setattr(versions, "read_version", lambda root=tree: "0.3.0")
    assert versions.main(["--check"]) == 1
    assert "uv.lock" in capsys.readouterr().err
    assert versions.main([]) == 0
    assert versions.main(["--check"]) == 0
