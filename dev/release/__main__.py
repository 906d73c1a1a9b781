"""`python -m dev.release [VERSION]`: release a version, or build what a commit publishes.

With VERSION (make release): check, make the commits and the tag, build, and only then bring both into this repository.
Without (make artifacts): build the commit that is checked out, which is a release if it has the release's tag.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from dev import values_table, versions
from dev.folders import ROOT, replace
from dev.release import changelog, checks, git, images, packages
from rljob_cluster.host.commands import ClusterError
from rljob_cluster.host.go_programs import find_or_build
from rljob_cluster.images.build import FOLDERS
from rljob_core.defaults import image_tag


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    options = _parse(arguments)
    try:
        made = release(root, options.version, options.date, options) if options.version else build(root, options)
    except (ValueError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        print(f"error: `{command}` failed ({error.returncode}); this repository is as it was", file=sys.stderr)
        print(error.output or "", file=sys.stderr)
        return 1
    print(made)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dev.release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", nargs="?", metavar="VERSION", help="such as 0.2.0; default: build this commit")
    parser.add_argument("--out", type=Path, default=Path("release"), help="folder of VERSION/; default: %(default)s")
    names = "all, none, or names such as operator,reward"
    parser.add_argument("--images", default="all", type=_read_images, help=names)
    there = "push images and chart there, such as registry.example.com/team"
    parser.add_argument("--registry", type=lambda text: text.rstrip("/"), help=there)
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine())
    parser.add_argument("--architectures", default=machine, help="of the images in the registry; default: %(default)s")
    parser.add_argument("--insecure", action="store_true", help="the registry speaks HTTP")
    parser.add_argument("--dry-run", action="store_true", help="build, but neither commit nor tag nor push")
    parser.add_argument("--date", default=datetime.now(UTC).strftime("%Y-%m-%d"), help="of the release; default: today")
    return parser.parse_args(arguments)


def _read_images(text: str) -> tuple[str, ...]:
    return {"all": tuple(FOLDERS), "none": ()}.get(text, tuple(text.split(",")))


def release(root: Path, version: str, date: str, options: argparse.Namespace) -> str:
    """Return what was made. Raise ValueError with all that keeps the version from being released."""
    if problems := checks.find_problems(git.read_facts(root), version):
        raise ValueError("\n  ".join([f"{version} cannot be released:", *problems]))
    with tempfile.TemporaryDirectory(prefix="rljob-release-") as folder:
        tree = git.clone(root, Path(folder) / "tree")
        commit = commit_release(tree, version, date)
        made = build_tree(tree, version, commit, options)
        commit_development(tree, checks.next_version(version))
        if not options.dry_run:
            git.take(root, tree, checks.tag_of(version))
    if options.dry_run:
        return f"{made}\ndry run: no commit, no tag, nothing pushed"
    return f"{made}\nnext: git push --atomic origin HEAD {checks.tag_of(version)}"


def commit_release(tree: Path, version: str, date: str) -> str:
    path = tree / "CHANGELOG.md"
    path.write_text(changelog.close_unreleased(path.read_text(), version, date))
    changed = [*_write_version(tree, version), path]
    commit = git.commit(tree, changed, f"Release {version}")
    git.add_tag(tree, checks.tag_of(version), f"RLJob {version}")
    return commit


def commit_development(tree: Path, version: str) -> str:
    """So that no build of main has a released version."""
    return git.commit(tree, _write_version(tree, version), f"Begin {version}")


def _write_version(tree: Path, version: str) -> list[Path]:
    """Write the version, and the table of values that contains it."""
    changed = versions.write_version(tree, version)
    readme, values = (tree / "charts/rljob" / name for name in ("README.md", "values.yaml"))
    readme.write_text(replace(readme.read_text(), "values", values_table.render(values.read_text())))
    return [tree / path for path in changed]


def build(root: Path, options: argparse.Namespace) -> str:
    """Build the commit that is checked out, from a clone; of main, with the commit in its version."""
    facts, commit = git.read_facts(root), git.read_commit(root)
    version = checks.find_build_version(facts, commit, git.list_tags_of_head(root))
    with tempfile.TemporaryDirectory(prefix="rljob-release-") as folder:
        tree = git.clone(root, Path(folder) / "tree")
        _write_version(tree, version)
        return build_tree(tree, version, commit, options)


def build_tree(tree: Path, version: str, commit: str, options: argparse.Namespace) -> str:
    """Build and push all; return a line for each part."""
    out = options.out / image_tag(version)
    shutil.rmtree(out, ignore_errors=True)
    for name in ("wheels", "sbom"):
        (out / name).mkdir(parents=True)
    helm = find_or_build("helm") / "helm"
    packages.build_wheels(tree, (out / "wheels").resolve(), git.read_time(tree))
    architectures = options.architectures if options.images else ""
    chart = packages.package_chart(helm, tree, out, commit, options.registry, architectures)
    packages.write_licences(out, packages.write_sboms(tree, out / "sbom", version))
    title = version if checks.is_released(version) else "Unreleased"
    (out / "NOTES.md").write_text(changelog.read_section((tree / "CHANGELOG.md").read_text(), title) + "\n")
    built = images.build_images(tree, options.images, commit) if options.images else []
    pushed = {}
    if options.registry and not options.dry_run:
        pushed = {each["image"]: images.push_image(each, options.registry, options.insecure) for each in built}
        pushed["chart"] = images.push_chart(helm, chart, options.registry, options.insecure)
    facts = {"version": version, "tag": image_tag(version), "commit": commit, "images": built, "pushed": pushed}
    (out / "release.json").write_text(json.dumps(facts, indent=2) + "\n")
    packages.write_checksums(out)
    wheels = len(list((out / "wheels").glob("*.whl")))
    made = f"RLJob {version}, commit {commit}: {wheels} wheels, chart, SBOMs, licences and SHA256SUMS in {out}"
    return "\n".join([made, *(f"pushed {name} {digest}" for name, digest in pushed.items())])


if __name__ == "__main__":
    sys.exit(main())
