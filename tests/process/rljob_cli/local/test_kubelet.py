"""The kubelet with small real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from rljob_cli.local.node.container import read_tail
from rljob_cli.local.node.podshim import descendants, scan_processes
from rljob_cli.manifests import is_ready
from tests.support.local_cluster import deployment, until

SERVER = """
import http.server, os, pathlib
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if pathlib.Path('flag').exists() else 503)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer((os.environ['IP'], 8080 + int(os.environ['RLJOB_PORT_OFFSET'])), Handler).serve_forever()
"""
IP = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
READINESS = {"httpGet": {"port": "http", "path": "/ready"}, "periodSeconds": 0.1, "failureThreshold": 1}
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"selector": {"app": "d"}}}


def only_pod(cluster):
    pods = list(cluster.store.pods.values())
    return pods[0] if len(pods) == 1 else None


def container_status(cluster):
    pod = only_pod(cluster) or {}
    return (pod.get("status", {}).get("containerStatuses") or [{}])[0]


def restarted(cluster):
    status = container_status(cluster)
    return status if status.get("restartCount") else None


def alive(pid):
    return pid in descendants([0])


def read_pid(path):
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else 0


def grandchild_script(pid_file):
    """A script that starts a child in a new session, which writes its pid to a file."""
    child = (
        f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()) + chr(10)); "
        "time.sleep(300)"
    )
    return (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "time.sleep(300)"
    )


async def test_service_name_resolves_only_while_its_pod_is_ready(cluster):
    await cluster.store.apply(SERVICE)
    ports = [{"name": "http", "containerPort": 8080}]
    await cluster.store.apply(deployment("d", SERVER, env=[IP], ports=ports, readinessProbe=READINESS))
    pod = await until(lambda: only_pod(cluster) if container_status(cluster).get("started") else None, "started")
    assert not is_ready(pod)
    hosts = cluster.paths.hosts
    assert hosts.read_text() == ""
    flag = cluster.paths.pod(pod["metadata"]["name"]) / "flag"
    flag.touch()
    address = pod["status"]["podIP"]
    await until(lambda: f"{address} s " in hosts.read_text(), "the ready Pod is in the hosts file")
    url = f"http://{address}:{cluster.network.port(8080)}/"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
    flag.unlink()
    await until(lambda: hosts.read_text() == "", "the unready Pod left the hosts file")
    ready = await until(lambda: cluster.store.find("Deployment", "d").get("status"), "status")
    assert ready["readyReplicas"] == 0


async def test_failed_container_restarts_on_the_same_address(cluster):
    script = (
        "import pathlib, sys, time\n"
        "p = pathlib.Path('n'); n = p.exists(); p.touch(); n or sys.exit('boom')\n"
        "time.sleep(60)"
    )
    await cluster.store.apply(deployment("d", script))
    first = await until(lambda: (only_pod(cluster) or {}).get("status", {}).get("podIP"), "an address")
    status = await until(
        lambda: container_status(cluster) if container_status(cluster).get("restartCount") else None, "a restart"
    )
    await until(lambda: "running" in container_status(cluster)["state"], "it runs again")
    assert status["lastState"]["terminated"]["exitCode"] == 1
    assert status["lastState"]["terminated"]["message"] == "boom"
    assert only_pod(cluster)["status"]["podIP"] == first
    log = (cluster.paths.logs / f"{only_pod(cluster)['metadata']['name']}.log").read_text()
    assert log.count(" start ") == 2, "each start has a marker"


async def test_grandchild_in_another_session_dies_with_its_container(cluster, tmp_path):
    pid_file = tmp_path / "pid"
    script = grandchild_script(pid_file)
    await cluster.store.apply(deployment("d", script))
    pid = await until(lambda: read_pid(pid_file), "the grandchild runs")
    await cluster.store.delete("default", ("Deployment", "d"))
    await until(lambda: not cluster.store.pods, "the Pod is removed")
    assert not alive(pid)


async def test_killed_shim_leaves_no_orphan(cluster, tmp_path):
    pid_file = tmp_path / "pid"
    script = grandchild_script(pid_file)
    await cluster.store.apply(deployment("d", script))
    pid = await until(lambda: read_pid(pid_file), "the grandchild runs")
    parent = {child: parent for parent, children in scan_processes()[0].items() for child in children}
    shim = parent[parent[pid]]
    pid_file.unlink()
    os.kill(shim, signal.SIGKILL)
    await until(lambda: not alive(pid), "the orphan is dead")
    await until(lambda: container_status(cluster).get("restartCount"), "the container starts again")


async def test_process_that_ignores_sigterm_is_killed_after_the_grace_period(cluster):
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
    )
    await cluster.store.apply(deployment("d", script))
    pod = await until(lambda: only_pod(cluster), "a Pod")
    log = cluster.paths.logs / f"{pod['metadata']['name']}.log"
    await until(lambda: log.exists() and "up" in read_tail(log), "the process handles SIGTERM")
    await cluster.stop(grace_seconds=0.2)
    assert "exit code 137" in log.read_text()


async def test_failed_liveness_probe_restarts_the_container(cluster):
    probe = {"exec": {"command": ["python", "-c", "raise SystemExit(1)"]}, "periodSeconds": 0.1, "failureThreshold": 2}
    probe["timeoutSeconds"] = 10
    await cluster.store.apply(deployment("d", "import time; time.sleep(300)", livenessProbe=probe))
    status = await until(
        lambda: container_status(cluster) if container_status(cluster).get("restartCount") else None, "a restart"
    )
    assert status["lastState"]["terminated"]["exitCode"] == 143


STOPPED = """
import os, signal, socket
server = socket.create_server((os.environ['IP'], 8080 + int(os.environ['RLJOB_PORT_OFFSET'])))
os.kill(os.getpid(), signal.SIGSTOP)
"""


async def test_stopped_program_is_killed_and_its_status_says_why(cluster):
    """Its port accepts connections, and it hears no signal."""
    alive = {"httpGet": {"port": "http", "path": "/live"}, "timeoutSeconds": 0.2, "terminationGracePeriodSeconds": 0.1}
    start = {"tcpSocket": {"port": "http"}, "periodSeconds": 0.1, "failureThreshold": 200}
    probes = {"startupProbe": start, "livenessProbe": alive | {"periodSeconds": 0.1, "failureThreshold": 2}}
    ports = [{"name": "http", "containerPort": 8080}]
    await cluster.store.apply(deployment("d", STOPPED, env=[IP], ports=ports, **probes))
    status = await until(lambda: restarted(cluster), "a restart")
    ended = status["lastState"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (137, "its liveness probe failed: no answer within 0.2 s")


async def test_changed_config_map_updates_the_file_of_a_running_pod(cluster, tmp_path):
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "conf"}, "data": {"key": "one"}}
    await cluster.store.apply(config)
    volumes = [{"name": "conf", "configMap": {"name": "conf"}}, {"name": "scratch", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "conf", "mountPath": "/etc/conf"}, {"name": "scratch", "mountPath": "/dev/shm"}]
    script = "import pathlib, sys, time; print(pathlib.Path(sys.argv[1]).read_text(), flush=True); time.sleep(300)"
    manifest = deployment("d", script, volumes=volumes, volumeMounts=mounts)
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["args"] = ["/etc/conf/key"]
    await cluster.store.apply(manifest)
    pod = await until(lambda: only_pod(cluster), "a Pod")
    name = pod["metadata"]["name"]
    log = cluster.paths.logs / f"{name}.log"
    await until(lambda: log.exists() and read_tail(log) == "one", "the container read its file")
    assert (cluster.paths.memory_of(pod) / "scratch").is_dir()
    await cluster.store.apply({**config, "data": {"key": "two"}})
    file = cluster.paths.pod(name) / "volumes" / "conf" / "key"
    await until(lambda: file.read_text() == "two", "the file changed")


async def test_missing_claim_names_the_volume_option(cluster):
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "models"}}]
    mounts = [{"name": "v", "mountPath": "/models"}]
    await cluster.store.apply(deployment("d", "pass", volumes=volumes, volumeMounts=mounts))
    scheduled = await until(
        lambda: [c for c in (only_pod(cluster) or {}).get("status", {}).get("conditions", []) if c.get("message")],
        "a restart",
    )
    assert "--volume models=DIR" in scheduled[0]["message"]


async def test_container_starts_when_its_secret_is_created(cluster):
    token = {"name": "T", "valueFrom": {"secretKeyRef": {"name": "token", "key": "t"}}}
    await cluster.store.apply(deployment("d", "import time; time.sleep(300)", env=[token]))
    waiting = await until(lambda: container_status(cluster).get("state", {}).get("waiting"), "the container waits")
    await until(
        lambda: container_status(cluster)["state"].get("waiting", {}).get("reason") == "CreateContainerConfigError",
        "a restart",
    )
    assert waiting
    await cluster.store.apply({"kind": "Secret", "metadata": {"name": "token"}, "data": {"t": "eA=="}})
    await until(lambda: "running" in container_status(cluster)["state"], "the container runs")


async def test_stop_leaves_no_process_and_no_memory_folder(tmp_path, cluster):
    await cluster.store.apply(deployment("d", "import time; time.sleep(300)", replicas=2))
    await until(lambda: len(cluster.store.pods) == 2, "two Pods")
    await until(lambda: all(p["status"]["phase"] == "Running" for p in cluster.store.pods.values()), "both run")
    await cluster.stop(5)
    shims = [pid for pid in descendants([os.getpid()]) if b"podshim" in cmdline(pid)]
    assert not shims
    assert not cluster.paths.memory.exists()


def cmdline(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(autouse=True)
async def _check_background_tasks(cluster):
    yield
    cluster.check()
    await asyncio.sleep(0)


async def test_termination_message_is_what_the_program_wrote_and_not_its_last_lines(cluster):
    code = (
        "import os, pathlib, sys; pathlib.Path(os.environ['RLJOB_TERMINATION_LOG']).write_text('error: the cause')\n"
        "print('a library says goodbye'); sys.exit(78)"
    )
    await cluster.store.apply(deployment("d", code))
    status = await until(lambda: restarted(cluster), "the container ended")
    assert status["lastState"]["terminated"]["message"] == "error: the cause"


async def test_termination_message_of_an_earlier_run_is_forgotten(cluster):
    code = (
        "import os, pathlib, sys; p = pathlib.Path('n'); n = p.exists(); p.touch()\n"
        "n or pathlib.Path(os.environ['RLJOB_TERMINATION_LOG']).write_text('error: first')\n"
        "print('second'); sys.exit(1)"
    )
    await cluster.store.apply(deployment("d", code))

    def last_message():
        ended = container_status(cluster).get("lastState", {}).get("terminated", {})
        return ended.get("message") == "second"

    await until(last_message, "the second run ended with its own message")
