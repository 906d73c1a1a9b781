"""The wheels, the chart, the bills of materials (SBOM) and the licences of one commit, as files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from dev.release.chart import describe
from dev.release.licences import build_table, find_licence

_TRACKERS = ("--extra", "tensorboard", "--extra", "wandb", "--extra", "mlflow", "--extra", "trackio")
PARTS: Mapping[str, tuple[str, ...]] = {
    "cli": ("rljob",),
    "operator": ("rljob-operator",),
    "reward": ("rljob-service",),
    "trainer-cpu": ("rljob-trainer", "--extra", "cpu", *_TRACKERS),
    "trainer-gpu": ("rljob-trainer", "--extra", "gpu", *_TRACKERS),
}
"""What has a bill of materials of its own: the command's installation, and the images. Arguments of `uv export`."""
_EXPORT = ("uv", "export", "--quiet", "--frozen", "--no-default-groups", "--no-emit-workspace")
_CYCLONEDX = ("--format", "cyclonedx1.5", "--preview-features", "sbom-export")


def build_wheels(tree: Path, out: Path, seconds: str) -> None:
    """Build all packages. `seconds` is the time of the files in them, so that equal commits have equal wheels."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": seconds}
    command = ["uv", "build", "--quiet", "--wheel", "--all-packages", "--out-dir", str(out)]
    subprocess.run(command, cwd=tree, env=environment, check=True)
    for path in (out / ".gitignore", *out.glob("rljob_cluster-*.whl")):  # the test cluster is for developers
        path.unlink(missing_ok=True)
    for path in (tree / "inputs/rljob_inputs/machine/requirements").glob("*.txt"):
        shutil.copy(path, out)


def package_chart(helm: Path, tree: Path, out: Path, commit: str, registry: str | None, architectures: str) -> Path:
    """Package a copy of the chart that names its commit, the images of a registry, and their nodes."""
    copy = out / "rljob"
    shutil.copytree(tree / "charts/rljob", copy)
    for name in ("Chart.yaml", "values.yaml", "README.md"):
        (copy / name).write_text(describe(name, (copy / name).read_text(), commit, registry, architectures))
    subprocess.run([helm, "package", copy, "--destination", out], stdout=subprocess.DEVNULL, check=True)
    shutil.rmtree(copy)
    return next(out.glob("rljob-*.tgz"))


def write_sboms(tree: Path, out: Path, version: str) -> dict[str, dict[str, str]]:
    """Write a bill of materials for each part; return their packages' versions by name."""
    found = {}
    for part, arguments in PARTS.items():
        command = [*_EXPORT, *_CYCLONEDX, "--package", *arguments]
        text = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True, check=True).stdout
        bill = json.loads(text)
        bill["metadata"]["component"] |= {"name": f"rljob-{part}", "version": version}
        (out / f"rljob-{part}.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")
        found[part] = {item["name"]: item["version"] for item in bill["components"]}
    return found


def write_licences(out: Path, packages: Mapping[str, Mapping[str, str]]) -> None:
    """Write the licence of each package of the bills, as far as it is installed here."""
    names = {name for found in packages.values() for name in found}
    (out / "LICENSES.md").write_text(build_table(packages, {name: _read_licence(name) for name in names}))


def _read_licence(name: str) -> str | None:
    try:
        return find_licence(metadata.metadata(name))
    except metadata.PackageNotFoundError:
        return None


def write_checksums(out: Path) -> None:
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(out)}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(lines))
