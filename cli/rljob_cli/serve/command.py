"""`rljob serve`: a training service for clients of Tinker's SDK, on this machine.

It builds a job with spec.service from the options, and runs it as `rljob run` does. Invariant: when a function here
returns or raises, no process that it started is alive.
"""

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_cli.check.device_fields import divide
from rljob_cli.check.jobfile import apply_override
from rljob_cli.commands import use_fast_types
from rljob_cli.local.network import claim_block
from rljob_cli.local.node.gpus import find_gpus
from rljob_cli.options import ServeOptions
from rljob_cli.run import runfolder
from rljob_cli.run.command import serve_job
from rljob_cli.run.live import PlainOutput
from rljob_cli.tables import make_error_console
from rljob_inputs.hub import name_model, read_source
from rljob_inputs.machine.installation import require

_CPU_TOKENS = 2048


def serve_command(options: ServeOptions) -> int:
    require("rljob serve")
    job = build_job(_find_model(options.model), options)
    use_fast_types(job, {})
    folder = (options.directory / job.metadata.name).resolve()
    with runfolder.lock(folder):
        runfolder.prepare(folder, job)
        network, output = claim_block(str(folder), options.network), PlainOutput(make_error_console())
        return serve_job(job, folder, network, {}, output, (options.host, options.port))


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
    name = re.sub(r"[^a-z0-9]+", "-", name_model(source).lower()).strip("-")
    manifest: dict[str, Any] = {
        "metadata": {"name": f"serve-{name}"[:40].strip("-")},
        "spec": {
            "model": {"source": source},
            "service": {
                "modelName": options.name,
                "maxAdapters": options.max_adapters,
                "maxRank": options.max_rank,
                "clients": options.clients or ["default"],
            },
            "trainer": trainer,
            "rollout": rollout,
        },
    }
    for override in options.overrides or []:
        apply_override(manifest, override)
    try:
        return RLJob.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _find_model(given: str) -> str:
    """Return the source of the job's model."""
    source = read_source(given, Path())
    if "://" in source:
        return source
    if not (Path(source) / "config.json").is_file():
        raise UserError(f"{given} has no config.json; pass hf://org/name, or a folder in Hugging Face format")
    return str(Path(source).resolve())
