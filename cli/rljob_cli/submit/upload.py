"""Copies files to a claim, through a Pod that mounts it and runs `tar`.

The Pod has the image, the node pool and the rights of the head, so that it starts wherever the job does. Invariant: a
folder with the marker is complete, and is not copied again.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence

from rljob_cli.cluster.client import Cluster, ClusterError
from rljob_cli.cluster.pod_start import wait_until_ready
from rljob_cli.submit import archive
from rljob_cli.submit.plan import LABEL_FILES, Upload
from rljob_core.backend import Manifest
from rljob_core.kube.resources import POD

_MOUNT = "/claim"
_MARKER = ".complete"
_SCRIPT = f'mkdir -p "$1" && head -c "$2" | tar xf - -C "$1" && touch "$1/{_MARKER}"'
_MAX_POD_SECONDS = 6 * 3600
"""Then the Pod ends, also if this command was killed."""
_REMEDY = "pass --claim with a claim that exists, or --storage-class, or set head.image and head.nodePool"
_LARGE_BYTES = 100_000_000
_HEAD_FIELDS = ("securityContext", "nodeSelector", "tolerations", "imagePullSecrets", "serviceAccountName")
_RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}


def build_pod(head: Manifest, job: str, claim: str) -> Manifest:
    """Build the Pod from that of the job's head."""
    spec, [container, *_] = head["spec"], head["spec"]["containers"]
    upload = {
        "name": "upload",
        "image": container["image"],
        "command": ["sleep", str(_MAX_POD_SECONDS)],
        "resources": _RESOURCES,
        "volumeMounts": [{"name": "claim", "mountPath": _MOUNT}],
        **({"securityContext": container["securityContext"]} if "securityContext" in container else {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{job}-upload-{secrets.token_hex(3)}", "labels": {LABEL_FILES: job}},
        "spec": {name: spec[name] for name in _HEAD_FIELDS if name in spec}
        | {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "containers": [upload],
            "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }


async def upload(cluster: Cluster, pod: Manifest, uploads: Sequence[Upload], say: Callable[[str], None]) -> int:
    """Copy what the claim does not have yet. Return the number of bytes. Raise ClusterError if a copy fails."""
    name = pod["metadata"]["name"]
    await cluster.apply(POD, pod)
    try:
        await wait_until_ready(cluster, name, "copies the files", _REMEDY, say)
        return sum([await _copy(cluster, name, item, say) for item in uploads])
    finally:
        await cluster.delete(POD, name)


async def _copy(cluster: Cluster, pod: str, item: Upload, say: Callable[[str], None]) -> int:
    folder = f"{_MOUNT}/{item.folder}"
    if (await cluster.execute(pod, ["test", "-e", f"{folder}/{_MARKER}"])).exit_code == 0:
        say(f"{item.path} is already on the claim, in {item.folder}")
        return 0
    say(f"copying {item.path} ({item.tree.num_bytes / 1e6:.1f} MB) to {item.folder} on the claim")
    size = archive.count_bytes(item.tree)
    chunks = report_progress(archive.stream(item.tree), size, say)
    ended = await cluster.execute(pod, ["sh", "-c", _SCRIPT, "sh", folder, str(size)], chunks)
    if ended.exit_code:
        remedy = "check that the claim has room and that the job's user may write to it"
        raise ClusterError(f"{item.path}: copying failed: {ended.output.strip() or ended.exit_code}; {remedy}")
    return item.tree.num_bytes


def report_progress(chunks: Iterable[bytes], size: int, say: Callable[[str], None]) -> Iterator[bytes]:
    """Yield the chunks; report each tenth of a large archive."""
    num_sent, num_reported = 0, 0
    for chunk in chunks:
        yield chunk
        num_sent += len(chunk)
        tenths = 10 * num_sent // size
        if size >= _LARGE_BYTES and tenths > num_reported:
            num_reported = tenths
            say(f"  {num_sent / 1e6:.0f} of {size / 1e6:.0f} MB")
