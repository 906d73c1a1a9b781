"""A copy of a job's run folder, as far as reports need it, which follows the head's.

Reads the head through the API server with the job's token, and changes nothing. Invariant: a file of the copy is
complete, and as the head had it; a head, in which a job's own code may run, chooses no other path of this machine.

When no head runs, as after the job's end, a Pod of its own reads the claim with the run's files. It has the image, the
node pool and the security context of the head, and mounts the claim read-only. Its server listens inside the Pod alone,
for the port-forward of this command. Invariant: the Pod is deleted when the command ends; if the command is killed, the
Pod ends by itself, and is deleted with the job.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import aiohttp
from pydantic import TypeAdapter, ValidationError

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.run.files import PARAMETER_STEP, ModelFiles, RunFile, is_model_file, is_model_folder, is_run_file
from rljob_api.run.folder import TrajectoryFile, parse_trajectory_file
from rljob_api.wire import contract
from rljob_api.wire.contract import LABEL_JOB, LABEL_ROLE, PORT_DRIVER, PORT_RUN_FILES, RUN_ROUTE
from rljob_api.wire.text import clean_text
from rljob_cli.cluster.client import Cluster, ClusterError
from rljob_cli.cluster.pod_start import build_pod, started_pod
from rljob_cli.cluster.port_forward import forward_port
from rljob_cli.manifests import phase_of
from rljob_cli.output import say
from rljob_core.backend import Manifest
from rljob_core.children.common import HEAD
from rljob_core.children.config import read_token
from rljob_core.kube.resources import Resource
from rljob_core.plan.job import render_children
from rljob_core.plan.observed_job import name_of

LABEL_READER = "rljob.dev/reader"
_MAX_POD_SECONDS = 6 * 3600
_REMEDY = "check the claim of spec.checkpoint, and that no Pod of another node has it if it is ReadWriteOnce"
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
    reader = {
        "image": image,
        "command": ["python", "-m", "rljob_trainer.reader"],
        "env": [each for each in container["env"] if each["name"] in _ENV],
        "resources": _RESOURCES,
        "securityContext": container["securityContext"],
        "volumeMounts": mounts,
        "readinessProbe": {"exec": {"command": ["python", "-c", _CHECK]}, "periodSeconds": 2, "timeoutSeconds": 10},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    built = build_pod(placed, parsed.metadata.name, "reader", LABEL_READER, reader, volumes)
    owner = {name: job[name] for name in ("apiVersion", "kind")}
    built["metadata"]["ownerReferences"] = [owner | {name: job["metadata"][name] for name in ("name", "uid")}]
    built["spec"]["activeDeadlineSeconds"] = _MAX_POD_SECONDS
    return built


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
    async with started_pod(cluster, pod, "reads the run's files", _REMEDY, say) as name:
        yield name


_SECRET = Resource("Secret", "v1", "secrets")
_TIMEOUT = aiohttp.ClientTimeout(total=600, sock_connect=30, sock_read=60)
_MODEL_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
"""A file of a model may have tens of GB: its copy ends when no more comes."""
_FILES: TypeAdapter[list[RunFile]] = TypeAdapter(list[RunFile])
_CHUNK_BYTES = 1 << 20
_MAX_REASON_LENGTH = 1000
Select = Callable[[TrajectoryFile], bool]


class HeadPorts(NamedTuple):
    """Where the head's servers are on this machine."""

    driver: str
    files: str
    token: str
    problems: Sequence[RLJobError] = ()
    """Why the last connection to `files` failed."""


@contextlib.asynccontextmanager
async def open_head(cluster: Cluster, job: str) -> AsyncIterator[HeadPorts]:
    """Connect to the head of a job. Raise ClusterError if it does not run."""
    manifest = await cluster.get_job(job)  # an unknown name has its own message
    find_pod = partial(_find_head, cluster, job, _describe_kept(manifest))
    await find_pod()
    token = await _read_token(cluster, job)
    async with (
        forward_port(cluster, find_pod, PORT_DRIVER) as driver,
        forward_port(cluster, find_pod, PORT_RUN_FILES) as files,
    ):
        yield HeadPorts(driver.url, files.url, token, files.problems)


async def _read_token(cluster: Cluster, job: str) -> str:
    token = read_token(await cluster.find(_SECRET, f"{job}-token"))
    if token is None:
        raise ClusterError(f"RLJob {cluster.namespace}/{job}: its Secret {job}-token does not exist")
    return token


async def _list_heads(cluster: Cluster, job: str) -> list[Manifest]:
    """Return the Pods of the head, also those that have ended, oldest first."""
    pods = await cluster.list_pods(f"{LABEL_JOB}={job},{LABEL_ROLE}={HEAD}")
    return sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))


def _running(pods: Sequence[Manifest]) -> list[Manifest]:
    return [pod for pod in pods if phase_of(pod) == "Running"]


def _describe_kept(job: Manifest) -> str:
    """Return where files of a job without a head are."""
    storage = ((job.get("spec") or {}).get("checkpoint") or {}).get("storage")
    if not storage:
        return "only files on a claim or in checkpoint.storage outlive the head's Pod"
    return f"{storage.rstrip('/')}/{name_of(job)} has its checkpoints and exports: copy them from there"


async def _find_head(cluster: Cluster, job: str, kept: str) -> str:
    running = _running(await _list_heads(cluster, job))
    if not running:
        remedy = f"kubectl rljob explain {job} says why; {kept}"
        raise ClusterError(f"RLJob {cluster.namespace}/{job}: no head runs that would serve the run's files; {remedy}")
    return name_of(running[-1])


@contextlib.asynccontextmanager
async def open_files(cluster: Cluster, job: str) -> AsyncIterator[HeadPorts]:
    """Connect to the head of a job; without one, to a Pod that reads the claim with the run's files. It is deleted at
    the end. Raise ClusterError."""
    manifest = await cluster.get_job(job)
    heads = await _list_heads(cluster, job)
    if _running(heads) or not has_claim(manifest):
        async with open_head(cluster, job) as head:
            yield head
        return
    token = await _read_token(cluster, job)
    async with reader_pod(cluster, manifest, heads[-1] if heads else None) as name:

        async def find_pod() -> str:
            return name

        async with forward_port(cluster, find_pod, PORT_RUN_FILES) as files:
            yield HeadPorts("", files.url, token, files.problems)


async def copy_run(cluster: Cluster, job: str, folder: Path, select: Select) -> None:
    """Copy a job's run, as far as reports need it. Raise ClusterError."""
    async with open_files(cluster, job) as head, aiohttp.ClientSession() as session:
        try:
            await FolderCopy(session, head, folder).refresh(select)
        except TransientError as error:
            raise ClusterError(f"RLJob {cluster.namespace}/{job}: {error}") from None


class FolderCopy:
    def __init__(self, session: aiohttp.ClientSession, head: HeadPorts, folder: Path) -> None:
        self._session, self._url, self.folder = session, f"{head.files}{RUN_ROUTE}", folder
        self._headers = {"Authorization": f"Bearer {head.token}"}
        self._problems = head.problems
        self._known: dict[str, RunFile] = {}

    async def refresh(self, select: Select = lambda file: True) -> None:
        """Copy what has changed: of the trajectory log, the files that `select` chooses. Raise TransientError."""
        with self._explained():
            files = await self._list()
            for file in files:
                if self._known.get(file.name) != file and _is_wanted(file.name, select):
                    await self._copy(file)
            for name in self._known.keys() - {file.name for file in files}:  # of a step that is repeated, or too old
                (self.folder / name).unlink(missing_ok=True)
                del self._known[name]

    async def copy_model(self, step: str) -> ModelFiles:
        """Copy the model of a step, a number, last or best. Raise UserError, to follow the step, if there is none, and
        TransientError."""
        with self._explained():
            query = {PARAMETER_STEP: step}
            async with self._session.get(f"{self._url}/", params=query, headers=self._headers) as response:
                if response.status == HTTPStatus.NOT_FOUND:
                    raise UserError(clean_text(await response.text(), _MAX_REASON_LENGTH))
                response.raise_for_status()
                found = ModelFiles.model_validate_json(await response.read())
            if not (is_model_folder(found.folder) and found.files):
                raise TransientError(f"the head names {found.folder!r} as the folder of the model")
            for file in found.files:
                if not is_model_file(file.name) or not file.name.startswith(f"{found.folder}/"):
                    raise TransientError(f"the head names {file.name!r} as a file of the model")
                await self._copy(file, _MODEL_TIMEOUT)
                path = self.folder / file.name
                if not path.is_file() or path.stat().st_size != file.num_bytes:
                    raise TransientError(f"{file.name} has changed while it was copied; try again")
        return found

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, OSError, ValidationError) as error:
            cause = next(iter(self._problems), error)
            raise TransientError(f"the head does not serve the run's files: {cause or type(error).__name__}") from error

    async def _list(self) -> list[RunFile]:
        async with self._session.get(f"{self._url}/", headers=self._headers, timeout=_TIMEOUT) as response:
            response.raise_for_status()
            return [file for file in _FILES.validate_json(await response.read()) if is_run_file(file.name)]

    async def _copy(self, file: RunFile, timeout: aiohttp.ClientTimeout = _TIMEOUT) -> None:
        path = self.folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        url = f"{self._url}/{file.name}"
        async with self._session.get(url, headers=self._headers, timeout=timeout) as response:
            if response.status == HTTPStatus.NOT_FOUND:
                return  # deleted meanwhile
            response.raise_for_status()
            with partial.open("wb") as copy:
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    copy.write(chunk)
        partial.replace(path)
        self._known[file.name] = file


def _is_wanted(name: str, select: Select) -> bool:
    log = parse_trajectory_file(Path(name))
    return log is None or select(log)
