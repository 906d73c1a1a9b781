"""The chart's policy for fields of Pod templates, installed for one namespace.

An evaluation that fails refuses nothing in the chart, so here it fails the request.
"""

import json
import subprocess

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_cluster.host.go_programs import find_or_build
from tests.paths import CHART


def install_field_policy(control_plane: ControlPlane, namespace: str, release: str) -> str:
    """Return its manifest when it is stored; admission knows it later."""
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    values = ["--set-json", f"templatePolicy={json.dumps({'namespaceSelector': selector})}"]
    command = [find_or_build("helm") / "helm", "template", release, CHART, "-s", "templates/fieldpolicy.yaml", *values]
    done = subprocess.run([*command, "--kube-version", "1.37.0"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    manifest = done.stdout.replace("failurePolicy: Ignore", "failurePolicy: Fail")
    control_plane.kubectl("apply", "-f", "-", input=manifest)
    return manifest
