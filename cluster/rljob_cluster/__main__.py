"""`python -m rljob_cluster COMMAND`: the one-machine Kubernetes by its command line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from rljob_cluster.control_plane.control_plane import ControlPlaneError
from rljob_cluster.host import requirements
from rljob_cluster.host.commands import CommandError, run
from rljob_cluster.host.debian import NODE_PROGRAMS, PackagesError, install_missing
from rljob_cluster.host.go_programs import BuildError, find_or_build
from rljob_cluster.host.paths import ROOT, state_folder
from rljob_cluster.lifecycle import addons, supervisor
from rljob_cluster.node import image_sources
from rljob_cluster.node.node import Node

CHART = ROOT / "charts/rljob"


class ClusterError(Exception):
    """The command cannot be carried out; the message names the remedy."""


def up(state: Path) -> None:
    """Start the cluster, or find it running."""
    if supervisor.read_pid(state) is not None and (state / "run/ready").exists():
        print(f"the cluster runs\n{_exports(state)}")
        return
    _require_machine()
    start = time.monotonic()
    find_or_build(*supervisor.PROGRAMS)
    supervisor.stop(state)  # what a crash may have left
    state.mkdir(parents=True, exist_ok=True)
    supervisor.start_in_background(state, image_sources.find_sources(state))
    print(f"the cluster is up after {time.monotonic() - start:.0f} s\n{_exports(state)}")


def _exports(state: Path) -> str:
    """kubectl and helm were built too, for those who have none."""
    return f"export KUBECONFIG={state / 'kubeconfig'} PATH=$PATH:{find_or_build('kubectl', 'helm')}"


def _require_machine() -> None:
    if lacks := list(requirements.find_missing_requirements()):
        raise ClusterError("; ".join(lacks))
    install_missing(NODE_PROGRAMS)


def check(state: Path) -> None:
    """Whether `up` could start a cluster here."""
    lacks = [*requirements.find_missing_requirements(), requirements.find_disk_shortage(state.parent)]
    if found := [lack for lack in lacks if lack]:
        raise ClusterError("; ".join(found))
    print("this machine can be a cluster")


def load(state: Path, given: Sequence[str]) -> None:
    """Give every node the images that it has not."""
    _require_running(state)
    wanted = [(node, _find_missing(state, node, given)) for node in supervisor.build_nodes(state)]
    if lack := image_sources.describe_disk_shortage(wanted, state):
        raise ClusterError(lack)
    for node, missing in wanted:
        for source in missing:
            print(f"loading {Path(source).name} into {node.name}", flush=True)
            image_sources.load_image(node, source)
            with (node.folder / "loaded").open("a") as loaded:
                loaded.write(f"{source}\n")


def _find_missing(state: Path, node: Node, given: Sequence[str]) -> list[str]:
    lists = [state / "nodes/base/imported", node.folder / "loaded"]
    history = [line for path in lists if path.exists() for line in path.read_text().splitlines()]
    return image_sources.choose_missing(history, given)


def install(state: Path, values: Sequence[str]) -> None:
    """The chart of this repository. A changed image keeps its name here, so an annotation with the digest of what it
    was made of gives a new Pod to it."""
    _require_running(state)
    operator = next((s for s in image_sources.find_sources(state) if image_sources.name_of(s) == "operator"), "operator-none")
    annotation = rf"podAnnotations.rljob\.dev/inputs={image_sources.version_of(operator)}"
    sets = ["--set-string", annotation, *(part for value in values for part in ("--set", value))]
    helm = str(find_or_build("helm") / "helm")
    flags = ("--kubeconfig", str(state / "kubeconfig"), "--namespace", "rljob-system", "--create-namespace")
    run(helm, "upgrade", "--install", "rljob", str(CHART), *flags, *sets, "--wait", "--timeout", "5m")


def volume(state: Path, name: str, folder: Path, namespace: str) -> None:
    """A ReadWriteMany claim on a folder of this machine."""
    _require_running(state)
    folder.mkdir(parents=True, exist_ok=True)
    manifests = yaml.safe_dump_all(addons.build_volume(name, namespace, str(folder.resolve())))
    _kubectl(state, "apply", "--server-side", "-f", "-", input=manifests)
    _kubectl(state, "wait", "-n", namespace, f"pvc/{name}", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")


def _kubectl(state: Path, *arguments: str, input: str | None = None) -> str:
    program = str(find_or_build("kubectl") / "kubectl")
    return run(program, "--kubeconfig", str(state / "kubeconfig"), *arguments, input=input)


def _require_running(state: Path) -> None:
    if supervisor.read_pid(state) is None:
        raise ClusterError("no cluster runs here; start it with: make cluster")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rljob_cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("check", "up", "down", "status", "kubeconfig"):
        commands.add_parser(name)
    commands.add_parser("serve").add_argument("sources", nargs="*")
    commands.add_parser("load").add_argument("archives", nargs="*")
    parser_install = commands.add_parser("install")
    parser_install.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="values")
    parser_volume = commands.add_parser("volume")
    parser_volume.add_argument("name")
    parser_volume.add_argument("folder", type=Path)
    parser_volume.add_argument("--namespace", default="default")
    options = parser.parse_args(arguments)
    state = state_folder()
    try:
        if options.command == "check":
            check(state)
        elif options.command == "up":
            up(state)
        elif options.command == "down":
            supervisor.stop(state)
            print("the cluster is gone")
        elif options.command == "serve":
            supervisor.Supervisor(state, options.sources).serve()
        elif options.command == "kubeconfig":
            _require_running(state)
            print(state / "kubeconfig")
        elif options.command == "status":
            _require_running(state)
            print(_kubectl(state, "get", "nodes,pods", "-A", "-o", "wide"), end="")
        elif options.command == "load":
            load(state, [str(Path(path).resolve()) for path in options.archives] or image_sources.find_sources(state))
        elif options.command == "install":
            install(state, options.values)
        else:
            volume(state, options.name, options.folder, options.namespace)
    except (ClusterError, CommandError, BuildError, ControlPlaneError, PackagesError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
