"""A Pod of a command: built from the head's, so that it starts wherever the head does, and deleted at the end."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence

from rljob_cli.cluster.client import Cluster, ClusterError
from rljob_cli.cluster.formatting import describe_pod
from rljob_cli.manifests import is_ready
from rljob_cli.output import Say
from rljob_core.backend import Manifest
from rljob_core.kube.resources import POD

START_SECONDS = 900.0
"""Pulling the image of a trainer takes minutes."""
_POLL_SECONDS = 1.0


_HEAD_FIELDS = ("securityContext", "nodeSelector", "tolerations", "imagePullSecrets", "serviceAccountName")


def build_pod(
    head: Manifest, job: str, purpose: str, label: str, container: Manifest, volumes: Sequence[Manifest]
) -> Manifest:
    """`head`: the spec of the head's Pod. `purpose`: part of the name, and the name of the container. `label`: has the
    name of the job."""
    spec = {name: head[name] for name in _HEAD_FIELDS if name in head} | {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "containers": [{"name": purpose, **container}],
        "volumes": volumes,
    }
    metadata = {"name": f"{job}-{purpose}-{secrets.token_hex(3)}", "labels": {label: job}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@contextlib.asynccontextmanager
async def started_pod(cluster: Cluster, pod: Manifest, purpose: str, remedy: str, say: Say) -> AsyncIterator[str]:
    """Yield the Pod's name once it is ready, and delete it at the end. Raise as `wait_until_ready`."""
    name = pod["metadata"]["name"]
    try:
        await cluster.apply(POD, pod)
        await wait_until_ready(cluster, name, purpose, remedy, say)
        yield name
    except BaseException:
        with contextlib.suppress(ClusterError):  # why the command ends matters more
            await cluster.delete(POD, name)
        raise
    await cluster.delete(POD, name)


async def wait_until_ready(cluster: Cluster, name: str, purpose: str, remedy: str, say: Say) -> None:
    """Say what the Pod waits for, when that changes. `purpose`: what it does, for messages. Raise ClusterError, with
    the remedy, if it ends, is deleted, or is not ready in time."""
    deadline, last = time.monotonic() + START_SECONDS, ""
    while True:
        pod = await cluster.find(POD, name)
        if pod and is_ready(pod):
            return
        state = describe_pod(pod) if pod else "it was deleted"
        if state != last:
            say(f"Pod {name}, which {purpose}: {state}")
            last = state
        has_ended = pod is None or (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")
        if has_ended or time.monotonic() > deadline:
            raise ClusterError(f"Pod {name}, which {purpose}, did not start: {state}; {remedy}")
        await asyncio.sleep(_POLL_SECONDS)
