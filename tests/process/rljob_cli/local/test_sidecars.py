"""Native sidecars on the local backend, as the Pods of judges and models have them."""

from __future__ import annotations

from rljob_cli.manifests import is_ready
from tests.support.local_cluster import deployment, until

NOTE = """
import os, pathlib, signal, sys, time
note = pathlib.Path({note!r})
def write(word):
    with note.open('a') as file:
        file.write({name!r} + ' ' + word + '\\n')
def leave(number, frame):
    time.sleep({linger})
    write('ends')
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
write('starts')
time.sleep(300)
"""


def with_sidecar(note, script=None):
    """A Deployment whose main container needs some time to end; its sidecar ends at once."""
    main = deployment("d", NOTE.format(note=str(note), name="main", linger=0.2))
    script = script or NOTE.format(note=str(note), name="sidecar", linger=0)
    sidecar = {"name": "sidecar", "restartPolicy": "Always", "command": ["python", "-c", script]}
    main["spec"]["template"]["spec"]["initContainers"] = [sidecar]
    return main


def lines(note):
    return note.read_text().splitlines() if note.exists() else []


def pod_of(cluster):
    return next(iter(cluster.store.pods.values()), {})


async def test_sidecar_runs_with_the_main_container_and_ends_after_it(cluster, tmp_path):
    note = tmp_path / "note"
    await cluster.store.apply(with_sidecar(note))
    await until(lambda: sorted(lines(note)) == ["main starts", "sidecar starts"], "both run")
    await until(lambda: is_ready(pod_of(cluster)), "the Pod is ready")
    (status,) = pod_of(cluster)["status"]["initContainerStatuses"]
    assert "running" in status["state"]
    await cluster.stop(10.0)
    assert lines(note)[2:] == ["main ends", "sidecar ends"]


async def test_sidecar_that_ends_restarts_while_the_main_container_runs(cluster, tmp_path):
    note = tmp_path / "note"
    await cluster.store.apply(with_sidecar(note, script="raise SystemExit(3)"))
    await until(lambda: lines(note) == ["main starts"], "the main container runs")

    def restarts():
        statuses = pod_of(cluster).get("status", {}).get("initContainerStatuses") or [{}]
        return statuses[0].get("restartCount")

    await until(restarts, "the sidecar has restarted")
    assert pod_of(cluster)["status"]["phase"] == "Running"
    assert lines(note) == ["main starts"]
