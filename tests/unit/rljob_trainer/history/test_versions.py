"""What a run was made with."""

import huggingface_hub.constants
import pytest

from rljob_api.manifest.job_sections import Model
from rljob_trainer.history.versions import find_model_commit, find_versions


def test_versions_have_the_installed_packages_only():
    versions = find_versions()
    assert {"python", "rljob-trainer", "torch", "transformers"} <= versions.keys()
    assert all(versions.values())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The Hub's cache with one model, whose branch main is at the commit c0ffee."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--name"
    (folder / "snapshots" / "c0ffee").mkdir(parents=True)
    (folder / "snapshots" / "c0ffee" / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c0ffee")


@pytest.mark.parametrize(
    ("source", "revision", "commit"),
    [
        ("hf://org/name", None, "c0ffee"),
        ("hf://org/name", "main", "c0ffee"),
        ("hf://org/name", "other", None),
        ("hf://org/missing", None, None),
        ("/models/name", None, None),
    ],
)
def test_commit_is_the_one_in_the_cache(cache, source, revision, commit):
    assert find_model_commit(Model(source=source, revision=revision)) == commit
