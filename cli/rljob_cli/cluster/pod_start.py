"""Waits until a Pod that a command has created is ready."""

import asyncio
import time

from rljob_cli.cluster.client import Cluster, ClusterError
from rljob_cli.cluster.formatting import describe_pod
from rljob_cli.manifests import is_ready
from rljob_cli.output import Say
from rljob_core.kube.resources import POD

START_SECONDS = 900.0
"""Pulling the image of a trainer takes minutes."""
_POLL_SECONDS = 1.0


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
