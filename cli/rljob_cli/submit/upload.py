"""Copies files to a claim, through a Pod that mounts it and runs `tar`.

The Pod has the image, the node pool and the rights of the head, so that it starts wherever the job does. Invariant: a
folder with the marker is complete, and is not copied again.

A copy is a tar archive as a stream of known size, so that its reader needs no end of the stream. Links are followed:
the cache of Hugging Face has links only. Invariant: the chunks have `count_bytes` bytes.
"""

import tarfile
from collections.abc import Iterable, Iterator, Sequence

from rljob_api.errors import UserError
from rljob_cli.cluster.client import Cluster, ClusterError
from rljob_cli.cluster.pod_start import build_pod, started_pod
from rljob_cli.output import Say
from rljob_cli.submit.plan import LABEL_FILES, Upload
from rljob_cli.submit.sources import File, Tree
from rljob_core.backend import Manifest

_BLOCK_BYTES = tarfile.BLOCKSIZE

_CHUNK_BYTES = 256 * 1024

_END = bytes(2 * _BLOCK_BYTES)

_MODE = 0o644
"""Pods read the files as another user."""


_MOUNT = "/claim"
_MARKER = ".complete"
_SCRIPT = f'mkdir -p "$1" && head -c "$2" | tar xf - -C "$1" && touch "$1/{_MARKER}"'
_MAX_POD_SECONDS = 6 * 3600
"""Then the Pod ends, also if this command was killed."""
_REMEDY = "pass --claim with a claim that exists, or --storage-class, or set head.image and head.nodePool"
_LARGE_BYTES = 100_000_000
_RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}


def build_upload(head: Manifest, job: str, claim: str) -> Manifest:
    """Build the Pod from that of the job's head."""
    spec, [container, *_] = head["spec"], head["spec"]["containers"]
    upload = {
        "image": container["image"],
        "command": ["sleep", str(_MAX_POD_SECONDS)],
        "resources": _RESOURCES,
        "volumeMounts": [{"name": "claim", "mountPath": _MOUNT}],
        **({"securityContext": container["securityContext"]} if "securityContext" in container else {}),
    }
    volumes = [{"name": "claim", "persistentVolumeClaim": {"claimName": claim}}]
    return build_pod(spec, job, "upload", LABEL_FILES, upload, volumes)


async def upload(cluster: Cluster, pod: Manifest, uploads: Sequence[Upload], say: Say) -> int:
    """Copy what the claim does not have yet. Return the number of bytes. Raise ClusterError if a copy fails."""
    async with started_pod(cluster, pod, "copies the files", _REMEDY, say) as name:
        return sum([await _copy(cluster, name, item, say) for item in uploads])


async def _copy(cluster: Cluster, pod: str, item: Upload, say: Say) -> int:
    folder = f"{_MOUNT}/{item.folder}"
    if (await cluster.execute(pod, ["test", "-e", f"{folder}/{_MARKER}"])).exit_code == 0:
        say(f"{item.path} is already on the claim, in {item.folder}")
        return 0
    say(f"copying {item.path} ({item.tree.num_bytes / 1e6:.1f} MB) to {item.folder} on the claim")
    size = count_bytes(item.tree)
    chunks = report_progress(stream(item.tree), size, say)
    ended = await cluster.execute(pod, ["sh", "-c", _SCRIPT, "sh", folder, str(size)], chunks)
    if ended.exit_code:
        remedy = "check that the claim has room and that the job's user may write to it"
        raise ClusterError(f"{item.path}: copying failed: {ended.output.strip() or ended.exit_code}; {remedy}")
    return item.tree.num_bytes


def report_progress(chunks: Iterable[bytes], size: int, say: Say) -> Iterator[bytes]:
    """Yield the chunks; report each tenth of a large archive."""
    num_sent, num_reported = 0, 0
    for chunk in chunks:
        yield chunk
        num_sent += len(chunk)
        tenths = 10 * num_sent // size
        if size >= _LARGE_BYTES and tenths > num_reported:
            num_reported = tenths
            say(f"  {num_sent / 1e6:.0f} of {size / 1e6:.0f} MB")


def count_bytes(tree: Tree) -> int:
    return sum(len(_build_header(tree, file)) + _pad(file.num_bytes) for file in tree.files) + len(_END)


def stream(tree: Tree) -> Iterator[bytes]:
    """Yield the archive, whose names start with the tree's name. Raise UserError if a file changes meanwhile."""
    for file in tree.files:
        yield _build_header(tree, file)
        num_read = 0
        with file.path.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                num_read += len(chunk)
                if num_read <= file.num_bytes:
                    yield chunk
        if num_read != file.num_bytes:
            raise UserError(f"{file.path}: has changed while it was copied; run the command again")
        yield bytes(_pad(num_read) - num_read)
    yield _END


def _build_header(tree: Tree, file: File) -> bytes:
    info = tarfile.TarInfo(f"{tree.name}/{file.name}" if tree.is_folder else file.name)
    info.size, info.mode = file.num_bytes, _MODE
    info.mtime = file.modified_ns // 10**9
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _pad(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
