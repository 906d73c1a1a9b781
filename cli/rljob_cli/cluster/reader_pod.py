"""A Pod that reads the claim with a run's files, when no head does: for `rljob export`, `report` and `trajectories` of
a job that has ended.

It has the image, the node pool and the security context of the head, and mounts the claim read-only. Its server listens
inside the Pod alone, for the port-forward of this command. Invariant: the Pod is deleted when the command ends; if the
command is killed, the Pod ends by itself, and is deleted with the job.
"""

import contextlib
import secrets
from collections.abc import AsyncIterator

from pydantic import ValidationError

from rljob_api.manifest.job import RLJob
from rljob_api.wire import contract
from rljob_cli.cluster.client import CLAIM, Cluster, ClusterError
from rljob_cli.cluster.pod_start import wait_until_ready
from rljob_cli.manifests import phase_of
from rljob_cli.output import say
from rljob_core.backend import Manifest
from rljob_core.children.common import HEAD
from rljob_core.kube.resources import POD
from rljob_core.plan.job import render_children
from rljob_core.plan.observed_job import name_of

LABEL_READER = "rljob.dev/reader"
_MAX_POD_SECONDS = 6 * 3600
_REMEDY = "check the claim of spec.checkpoint, and that no Pod of another node has it if it is ReadWriteOnce"
_HEAD_FIELDS = ("securityContext", "nodeSelector", "tolerations", "imagePullSecrets", "serviceAccountName")
_ENV = (contract.ENV_TOKEN, contract.ENV_JOB_FILE, contract.ENV_RUN_DIR)
_VOLUMES = ("run", "config")
_CHECK = f"import socket; socket.create_connection(('127.0.0.1', {contract.PORT_RUN_FILES}), 5)"
"""A probe of the kubelet itself would need a server that other Pods reach."""
_RESOURCES = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}


def has_claim(job: Manifest) -> bool:
    """Whether the files of the job's run outlive its head."""
    return bool(((job.get("spec") or {}).get("checkpoint") or {}).get("persistentVolumeClaim"))


def build_reader(job: Manifest, pod: Manifest | None = None) -> Manifest:
    """Build the Pod from the head that the operator builds, with the image and the pull Secrets that the head had.
    `pod`: the head's last one, if it is there: it also has the defaults of the installation and of the namespace. Raise
    ClusterError for a job that has fields of a newer version."""
    try:
        parsed = RLJob.model_validate({name: job[name] for name in ("apiVersion", "kind", "metadata", "spec")})
    except ValidationError as error:
        name = job["metadata"]["name"]
        problem = f"RLJob {name}: this version of rljob cannot read its spec, so it cannot start a Pod for its files"
        raise ClusterError(f"{problem}; use that of the operator: {error.errors()[0]['msg']}") from None
    head = next(child for child in render_children(parsed, "") if child["kind"] == "Job")["spec"]["template"]["spec"]
    container = next(each for each in head["containers"] if each["name"] == HEAD)
    roles = (job.get("status") or {}).get("roles") or []
    image = next((role.get("image") for role in roles if role["name"] == HEAD), "") or container["image"]
    placed = (pod or {}).get("spec") or _add_pull_secrets(head, job)
    volumes = [_read_only(volume) for volume in head["volumes"] if volume["name"] in _VOLUMES]
    mounts = [each | {"readOnly": True} for each in container["volumeMounts"] if each["name"] in _VOLUMES]
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"]}
    owner |= {name: job["metadata"][name] for name in ("name", "uid")}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{parsed.metadata.name}-reader-{secrets.token_hex(3)}",
            "labels": {LABEL_READER: parsed.metadata.name},
            "ownerReferences": [owner],
        },
        "spec": {name: placed[name] for name in _HEAD_FIELDS if name in placed}
        | {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _MAX_POD_SECONDS,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "reader",
                    "image": image,
                    "command": ["python", "-m", "rljob_trainer.reader"],
                    "env": [each for each in container["env"] if each["name"] in _ENV],
                    "resources": _RESOURCES,
                    "securityContext": container["securityContext"],
                    "volumeMounts": mounts,
                    "readinessProbe": {
                        "exec": {"command": ["python", "-c", _CHECK]},
                        "periodSeconds": 2,
                        "timeoutSeconds": 10,
                    },
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                }
            ],
            "volumes": volumes,
        },
    }


def _add_pull_secrets(head: Manifest, job: Manifest) -> Manifest:
    """Return the head's spec with the pull Secrets of its last Pod, as the status has them."""
    known = (job.get("status") or {}).get("imagePullSecrets") or []
    names = [secret["name"] for secret in head.get("imagePullSecrets") or []] + known
    return head | ({"imagePullSecrets": [{"name": name} for name in dict.fromkeys(names)]} if names else {})


def _read_only(volume: Manifest) -> Manifest:
    claim = volume.get("persistentVolumeClaim")
    return volume | ({"persistentVolumeClaim": claim | {"readOnly": True}} if claim else {})


@contextlib.asynccontextmanager
async def reader_pod(cluster: Cluster, job: Manifest, head: Manifest | None = None) -> AsyncIterator[str]:
    """Yield the name of a Pod that serves the files of the job's run. `head`: the last Pod of its head. Raise
    ClusterError if it does not start."""
    pod = build_reader(job, head)
    if head is not None and phase_of(head) == "Pending":
        await _warn_of_pending_head(cluster, job, head)
    name = pod["metadata"]["name"]
    try:
        await cluster.apply(POD, pod)
        await wait_until_ready(cluster, name, "reads the run's files", _REMEDY, say)
        yield name
    except BaseException:
        with contextlib.suppress(ClusterError):  # why the command ends matters more
            await cluster.delete(POD, name)
        raise
    await cluster.delete(POD, name)


async def _warn_of_pending_head(cluster: Cluster, job: Manifest, head: Manifest) -> None:
    """Say that the head may have to wait for the claim, unless Pods of several nodes may have it."""
    claim = job["spec"]["checkpoint"]["persistentVolumeClaim"]["claimName"]
    found = None
    with contextlib.suppress(ClusterError):  # who may create Pods may not read claims
        found = await cluster.find(CLAIM, claim)
    modes = ((found or {}).get("spec") or {}).get("accessModes") or []
    if {"ReadWriteMany", "ReadOnlyMany"} & {*modes}:
        return
    say(
        f"warning: the head, Pod {name_of(head)}, waits to start. A claim that is ReadWriteOnce is on one node at a "
        f"time: if {claim} is, the head cannot start on another node while this command reads it. Ctrl-C ends it"
    )
