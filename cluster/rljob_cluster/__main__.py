"""`python -m rljob_cluster COMMAND`: a Kubernetes on one machine."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from rljob_cluster.host import requirements
from rljob_cluster.host.commands import ClusterError, run
from rljob_cluster.host.debian import NODE_PROGRAMS, install_missing
from rljob_cluster.host.go_programs import OWN_ADDONS, download_module, find_or_build, find_or_build_addon
from rljob_cluster.host.paths import ROOT, state_folder
from rljob_cluster.images.oci_layout import build_program_image
from rljob_cluster.lifecycle import addons, agent_sandbox, supervisor
from rljob_cluster.node import image_sources
from rljob_cluster.node.image_store import import_images
from rljob_cluster.node.node import Node

CHART = ROOT / "charts/rljob"


def check(state: Path) -> None:
    """Report whether `up` can start a cluster here."""
    problems = [*requirements.find_missing_requirements(), requirements.find_disk_shortage(state.parent)]
    if found := [problem for problem in problems if problem]:
        raise ClusterError("; ".join(found))
    print("this machine can run a cluster")


def up(state: Path) -> None:
    """Start the cluster unless it runs."""
    if supervisor.find_process(state) and (state / "run/ready").exists():
        print(f"the cluster is running\n{_exports(state)}")
        return
    if missing := list(requirements.find_missing_requirements()):
        raise ClusterError("; ".join(missing))
    install_missing(NODE_PROGRAMS)
    start = time.monotonic()
    find_or_build(*supervisor.PROGRAMS)
    supervisor.stop(state)  # removes what a crash left
    state.mkdir(parents=True, exist_ok=True)
    supervisor.start_in_background(state, image_sources.find_sources(state))
    print(f"the cluster is up after {time.monotonic() - start:.0f} s\n{_exports(state)}")


def _exports(state: Path) -> str:
    return f"export KUBECONFIG={state / 'kubeconfig'} PATH=$PATH:{find_or_build('kubectl', 'helm')}"


def down(state: Path) -> None:
    """Remove the cluster."""
    supervisor.stop(state)
    print("the cluster was removed")


def status(state: Path) -> None:
    """Print nodes and Pods."""
    print(_kubectl(state, "get", "nodes,pods", "-A", "-o", "wide"), end="")


def kubeconfig(state: Path) -> None:
    """Print the path of the kubeconfig."""
    _require_running(state)
    print(state / "kubeconfig")


def serve(state: Path, sources: Sequence[str]) -> None:
    """Run the cluster in the foreground, as `up` does in the background."""
    supervisor.Supervisor(state, list(sources)).serve()


def load(state: Path, archives: Sequence[str]) -> None:
    """Load missing images into every node; default: the images of this repository."""
    _require_running(state)
    sources = [str(Path(path).resolve()) for path in archives] or image_sources.find_sources(state)
    wanted = [(node, _find_missing(state, node, sources)) for node in supervisor.build_nodes(state)]
    if shortage := image_sources.describe_disk_shortage(wanted, state):
        raise ClusterError(shortage)
    for node, missing in wanted:
        for source in missing:
            print(f"loading {Path(source).name} into {node.name}", flush=True)
            image_sources.load_image(node, source)
            with (node.folder / "loaded").open("a") as loaded:
                loaded.write(f"{source}\n")


def _find_missing(state: Path, node: Node, sources: Sequence[str]) -> list[str]:
    lists = [state / "nodes/base/imported", node.folder / "loaded"]
    history = [line for path in lists if path.exists() for line in path.read_text().splitlines()]
    return image_sources.choose_missing(history, sources)


def install(state: Path, values: Sequence[str]) -> None:
    """Install this repository's chart. A changed image keeps its name here; an annotation with the version of the
    image restarts the operator's Pods."""
    _require_running(state)
    sources = {image_sources.name_of(source): source for source in image_sources.find_sources(state)}
    version = image_sources.version_of(sources.get("operator", "operator-none"))
    sets = ["--set-string", rf"podAnnotations.rljob\.dev/inputs={version}"]
    sets += [part for value in values for part in ("--set", value)]
    helm = str(find_or_build("helm") / "helm")
    flags = ("--kubeconfig", str(state / "kubeconfig"), "--namespace", "rljob-system", "--create-namespace")
    run(helm, "upgrade", "--install", "rljob", str(CHART), *flags, *sets, "--wait", "--timeout", "5m")


def install_agent_sandbox(state: Path) -> None:
    """Install kubernetes-sigs/agent-sandbox with its extensions. Idempotent."""
    _require_running(state)
    image = build_program_image(find_or_build_addon(agent_sandbox.CONTROLLER), agent_sandbox.IMAGE)
    import_images(next(node for node in supervisor.build_nodes(state) if node.pool == "system"), [image])
    rendered = _kubectl(state, "kustomize", str(download_module(agent_sandbox.MODULE) / "k8s"))
    manifests = agent_sandbox.build_manifests(rendered)
    _kubectl(state, "apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(manifests))
    controller = ("-n", agent_sandbox.NAMESPACE, f"deployment/{agent_sandbox.CONTROLLER}")
    _kubectl(state, "rollout", "status", *controller, "--timeout=120s")


def collector(state: Path) -> None:
    """Run OpenTelemetry's collector in the foreground, which prints each span. Needs no cluster."""
    program = str(find_or_build_addon("otelcol"))
    os.execv(program, [program, "--config", str(OWN_ADDONS["otelcol"] / "print.yaml")])


def volume(state: Path, name: str, folder: Path, namespace: str) -> None:
    """Create a ReadWriteMany claim on a folder of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    manifests = yaml.safe_dump_all(addons.build_volume(name, namespace, str(folder.resolve())))
    _kubectl(state, "apply", "--server-side", "-f", "-", input=manifests)
    _kubectl(state, "wait", "-n", namespace, f"pvc/{name}", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")


def power_off(state: Path, pool: str) -> None:
    """End the node of a pool as if its machine had lost its power."""
    _require_running(state)
    supervisor.set_power(state, pool, on=False)


def power_on(state: Path, pool: str) -> None:
    """Start the node of a pool again."""
    _require_running(state)
    supervisor.set_power(state, pool, on=True)


def _kubectl(state: Path, *arguments: str, input: str | None = None) -> str:
    _require_running(state)
    program = str(find_or_build("kubectl") / "kubectl")
    return run(program, "--kubeconfig", str(state / "kubeconfig"), *arguments, input=input)


def _require_running(state: Path) -> None:
    if supervisor.find_process(state) is None:
        raise ClusterError("no cluster is running; start one with: make cluster")


def main(arguments: Sequence[str] | None = None) -> int:
    options = vars(_build_parser().parse_args(arguments))
    command = options.pop("command")
    try:
        command(state_folder(), **options)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rljob_cluster", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(command: Callable[..., None]) -> argparse.ArgumentParser:
        added = commands.add_parser(command.__name__.replace("_", "-"), help=(command.__doc__ or "").partition(".")[0])
        added.set_defaults(command=command)
        return added

    for command in (check, up, down, status, kubeconfig, install_agent_sandbox, collector):
        add(command)
    add(serve).add_argument("sources", nargs="*")
    add(load).add_argument("archives", nargs="*")
    for power in (power_off, power_on):
        add(power).add_argument("pool", choices=supervisor.POOLS)
    add(install).add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="values")
    parser_volume = add(volume)
    parser_volume.add_argument("name")
    parser_volume.add_argument("folder", type=Path)
    parser_volume.add_argument("--namespace", default="default")
    return parser


if __name__ == "__main__":
    sys.exit(main())
