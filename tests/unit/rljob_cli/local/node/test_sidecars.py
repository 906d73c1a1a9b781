"""Native sidecars and users' Secrets on the local backend: what a judge's or a model's Pod needs of it."""

from __future__ import annotations

import base64

from rljob_api.manifest.job import RLJob
from rljob_cli.manifests import is_ready
from rljob_cli.local.node.gpus import num_wanted
from rljob_cli.local.node.volumes import RunPaths, folder_of
from rljob_cli.local.secrets import build_secrets
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
write('begins')
time.sleep(300)
"""


def with_sidecar(note, script=None):
    """A Deployment whose main container takes half a second to end; its sidecar ends at once."""
    main = deployment("d", NOTE.format(note=str(note), name="main", linger=0.5))
    beside = script or NOTE.format(note=str(note), name="beside", linger=0)
    sidecar = {"name": "beside", "restartPolicy": "Always", "command": ["python", "-c", beside]}
    main["spec"]["template"]["spec"]["initContainers"] = [sidecar]
    return main


def lines(note):
    return note.read_text().splitlines() if note.exists() else []


def pod_of(cluster):
    return next(iter(cluster.store.pods.values()), {})


async def test_a_sidecar_runs_beside_the_main_container_and_ends_after_it(cluster, tmp_path):
    note = tmp_path / "note"
    await cluster.store.apply(with_sidecar(note))
    await until(lambda: sorted(lines(note)) == ["beside begins", "main begins"], "both run")
    await until(lambda: is_ready(pod_of(cluster)), "the Pod is ready")
    (status,) = pod_of(cluster)["status"]["initContainerStatuses"]
    assert "running" in status["state"]
    await cluster.stop(10.0)
    assert lines(note)[2:] == ["main ends", "beside ends"]


async def test_a_sidecar_that_ends_is_started_again_and_the_main_container_goes_on(cluster, tmp_path):
    note = tmp_path / "note"
    await cluster.store.apply(with_sidecar(note, script="raise SystemExit(3)"))
    await until(lambda: lines(note) == ["main begins"], "the main container runs")

    def restarts():
        statuses = pod_of(cluster).get("status", {}).get("initContainerStatuses") or [{}]
        return statuses[0].get("restartCount")

    await until(restarts, "the sidecar was started again")
    assert pod_of(cluster)["status"]["phase"] == "Running"
    assert lines(note) == ["main begins"]


def test_a_sidecars_gpus_count():
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    pod = {"spec": {"containers": [{}], "initContainers": [gpu | {"restartPolicy": "Always"}, gpu]}}
    assert num_wanted(pod) == 2


def test_a_socket_fits_its_path_however_long_the_pods_name_is(tmp_path):
    pod = {"metadata": {"name": "a" * 90}, "spec": {}}
    volume = {"name": "vllm", "emptyDir": {"medium": "Memory"}}
    assert len(str(folder_of(volume, pod, RunPaths(tmp_path, {})) / "socket")) <= 107


def test_an_environment_variable_stands_for_the_key_of_a_users_secret():
    endpoint = {"url": "https://x", "model": "m", "apiKeySecretRef": {"name": "keys", "key": "MY_KEY"}}
    judge = {"template": "x", "parser": {"regex": "(x)"}, "endpoint": endpoint}
    spec = {"model": {"source": "/m"}, "data": {"train": {"source": "/d"}}, "rewards": [{"name": "r", "judge": judge}]}
    job = RLJob.model_validate({"metadata": {"name": "t"}, "spec": spec})
    secrets = build_secrets(job, {"MY_KEY": "sk", "OTHER": "no"})
    assert secrets["keys"]["data"] == {"MY_KEY": base64.b64encode(b"sk").decode()}
    assert build_secrets(job, {}) == {}
