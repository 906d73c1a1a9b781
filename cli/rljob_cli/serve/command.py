"""`rljob serve`: a training service for clients of Tinker's SDK, on this machine.

It runs the trainers and rollouts of a job that it builds from the options; the service takes the place of the head's
program, and there are no rewards and no data. Invariant: when `serve_command` returns or raises, no process that it
started is alive.
"""

import asyncio
import json
import re
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import ValidationError

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.run.folder import FILE_SERVICE
from rljob_api.wire.contract import LABEL_ROLE, ExitCode
from rljob_cli.check.device_fields import divide
from rljob_cli.check.jobfile import apply_override
from rljob_cli.check.waits import describe_end, find_ended_container, report
from rljob_cli.commands import use_fast_types
from rljob_cli.exits import EXIT_FAILED, EXIT_INTERRUPTED
from rljob_cli.local.cluster import LOCAL_DEFAULTS, STOP_SECONDS, LocalCluster, replace_head, running
from rljob_cli.local.network import claim_block
from rljob_cli.local.node.gpus import find_gpus
from rljob_cli.local.node.volumes import write_atomically
from rljob_cli.manifests import is_ready, labels_of, role_of
from rljob_cli.options import ServeOptions
from rljob_cli.output import print_error, say
from rljob_cli.run import runfolder
from rljob_core.backend import Manifest
from rljob_core.children.common import HEAD, ROLLOUT, TRAINER
from rljob_core.plan.job import new_random_token, render_children
from rljob_core.plan.observed_job import container_statuses
from rljob_inputs.hub import read_source, repository_name
from rljob_inputs.machine.installation import describe_tracker, has_module, require

_POLL_SECONDS = 0.2
_MAX_ENDS = 6
"""Ends of heads and trainers that are restarted, as in a job's backoffLimit."""
_CPU_TOKENS = 2048
_PATIENCE_SECONDS = 1800
"""The lowest limit of a call of the ranks: one may have a thousand times the tokens of those before."""
_CLIENT = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


def serve_command(options: ServeOptions) -> int:
    require("rljob serve")
    if not has_module("tinker"):
        raise UserError(f"rljob serve {describe_tracker('tinker')}")
    source = _find_model(options.model)
    name = options.name or _name(source)
    job = build_job(source, options)
    _check_port(options.host, options.port)
    use_fast_types(job, {})
    folder = (options.directory / job.metadata.name).resolve()
    with runfolder.lock(folder):
        runfolder.prepare(folder, job)
        keys = _find_keys(folder / FILE_SERVICE, options.clients or ["default"])
        settings = {
            "name": name,
            "host": options.host,
            "port": options.port,
            "max_adapters": options.max_adapters,
            "keys": keys,
        }
        write_atomically(folder / FILE_SERVICE, json.dumps(settings).encode(), 0o600)
        cluster = LocalCluster(job, claim_block(str(folder), options.network), folder)
        url = f"http://{options.host}:{options.port}"
        try:
            asyncio.run(_serve(cluster, build_service(job), url, name, keys))
        except (KeyboardInterrupt, asyncio.CancelledError):
            say(f"stopped; checkpoints are in {folder}")
            return EXIT_INTERRUPTED
        except TransientError as error:
            print_error(error, EXIT_FAILED)
            return EXIT_FAILED
    return 0


def build_job(source: str, options: ServeOptions) -> RLJob:
    """Return the job whose trainers and rollouts the service runs. Raise UserError if it cannot be."""
    num_gpus = len(find_gpus()) if options.gpus is None else options.gpus
    roles = divide(num_gpus, has_judge=False) if num_gpus else None
    if roles is not None and not roles.rollouts:
        raise UserError("rljob serve needs two GPUs, since the rollouts cannot share the trainer's; or pass --gpus 0")
    trainer = (
        {"gpusPerReplica": roles.trainer} if roles else {"replicas": options.ranks, "microBatchTokens": _CPU_TOKENS}
    )
    rollout = {"replicas": roles.rollouts, "gpusPerReplica": 1} if roles else {"replicas": 1}
    lora = {"rank": options.max_rank, "alpha": options.max_rank, "publish": "adapter"}
    manifest: dict[str, Any] = {
        "metadata": {"name": f"serve-{re.sub(r'[^a-z0-9]+', '-', _name(source).lower()).strip('-')}"[:40].strip("-")},
        "spec": {
            "model": {"source": source},
            # What no process of a service reads.
            "data": {"train": {"source": "/none.jsonl"}},
            "rewards": [{"name": "none", "function": {"inline": "def compute_score(): ..."}}],
            "trainer": {**trainer, "lora": lora},
            "rollout": rollout,
            "hangDetection": {"minSeconds": _PATIENCE_SECONDS},
            "checkpoint": {"export": "never"},
        },
    }
    for override in options.overrides or []:
        apply_override(manifest, override)
    try:
        return RLJob.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"--set: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def build_service(job: RLJob) -> list[Manifest]:
    """Return the job's objects without rewards. The head's Pod has another program."""

    def keeps(child: Manifest) -> bool:
        return labels_of(child).get(LABEL_ROLE, HEAD) in (HEAD, TRAINER, ROLLOUT)

    kinds = ("Secret", "ConfigMap", "Service", "Deployment", "StatefulSet", "Job")
    children = render_children(job, new_random_token(), defaults=LOCAL_DEFAULTS)
    kept = [child for child in children if child["kind"] in kinds and keeps(child)]
    replace_head(kept, "rljob_trainer.tinker", FILE_SERVICE)
    return kept


async def _serve(
    cluster: LocalCluster, children: Sequence[Manifest], url: str, name: str, keys: dict[str, str]
) -> None:
    async with running(cluster, children, STOP_SECONDS):
        waiting = asyncio.create_task(report(say, lambda seconds: _describe_wait(cluster, seconds)))
        try:
            await _wait_until_answers(cluster, url, next(iter(keys.values())))
        finally:
            waiting.cancel()
        say(f"serves {name}; Ctrl-C stops it, and the next start goes on. For a client:")
        say(f"export TINKER_BASE_URL={url}")
        for client, key in keys.items():
            say(f"export TINKER_API_KEY={key}{f'  # {client}' if len(keys) > 1 else ''}")
        while True:
            _check(cluster)
            await asyncio.sleep(_POLL_SECONDS)


async def _wait_until_answers(cluster: LocalCluster, url: str, key: str) -> None:
    async with aiohttp.ClientSession(headers={"X-API-Key": key}) as session:
        while True:
            _check(cluster)
            try:
                async with session.get(f"{url}/api/v1/healthz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(_POLL_SECONDS)


def _check(cluster: LocalCluster) -> None:
    """Raise the error of a part that would only end again. Others are replaced, and the service goes on."""
    cluster.check()
    pods = [pod for pod in cluster.store.pods.values() if role_of(pod) in (HEAD, TRAINER)]
    ends = [(pod, ended) for pod in pods if (ended := find_ended_container(pod))]
    num_ends = sum(max(1, *(each["restartCount"] for each in container_statuses(pod))) for pod, _ in ends)
    for pod, ended in ends:
        if ended["exitCode"] == ExitCode.USER or num_ends > _MAX_ENDS:
            raise TransientError(f"the service ended: {describe_end(pod, ended)}\nlogs: {cluster.paths.root / 'logs'}")


def _describe_wait(cluster: LocalCluster, seconds: float) -> str:
    starting = sorted({role_of(pod) for pod in cluster.store.pods.values() if not is_ready(pod)})
    return f"waits for {', '.join(starting) or 'the first weights'} ({seconds:.0f} s)"


def _find_model(given: str) -> str:
    """Return the source of the job's model."""
    source = read_source(given, Path())
    if "://" in source:
        return source
    if not (Path(source) / "config.json").is_file():
        raise UserError(f"{given} has no config.json; pass hf://org/name, or a folder in Hugging Face format")
    return str(Path(source).resolve())


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; pass another --port") from error


def _name(source: str) -> str:
    """Return by which clients know the model: org/name, or the name of its folder."""
    return repository_name(source) if source.startswith("hf://") else Path(source).name


def _find_keys(settings: Path, clients: Sequence[str]) -> dict[str, str]:
    """Return the key of each client: that of an earlier start, or a new one."""
    if wrong := [each for each in clients if not _CLIENT.fullmatch(each)]:
        raise UserError(f"--client {wrong[0]}: must be lower-case letters, digits and -, at most 40")
    try:
        earlier = json.loads(settings.read_text())["keys"]
    except (OSError, ValueError, KeyError):
        earlier = {}
    return {client: earlier.get(client) or f"tml-{secrets.token_urlsafe(24)}" for client in clients}
