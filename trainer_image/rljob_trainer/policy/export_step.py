"""Exports a checkpoint of a run: `python -m rljob_trainer.policy.export_step RUN STEP TO`, or `export_checkpoint`.

The sharded state of any number of ranks becomes one Hugging Face folder, by the trainer's own export, in one process on
CPUs: no Ray, no other rank, and no state of an optimizer is read. It takes the model's fp32 weights in host memory.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.read.pod_files import load_job_file
from rljob_api.run.folder import FILE_JOB, checkpoint_folder, complete_checkpoints
from rljob_api.wire.contract import ExitCode
from rljob_inputs.models.own_settings import load_model_settings
from rljob_trainer.history.run_state import FILE_DRIVER, open_checkpoint
from rljob_trainer.policy.checkpoints import export_model, load_weights, verify_checkpoint
from rljob_trainer.policy.policy import Policy
from rljob_trainer.run_folder.file_facts import DamagedCheckpointError


def export_checkpoint(run: Path, step: int, to: Path) -> float | None:
    """Write the model of a step to the new folder `to`, which exists once it is complete. Return how much of the
    adapters' update its weights have; None without adapters. Raise UserError if the run has no such checkpoint."""
    folder = checkpoint_folder(run, step)
    if step not in (known := complete_checkpoints(run)):
        raise UserError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, known)) or 'none'}")
    job = _without_training(_read_job(run))
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with _single_rank():
            verify_checkpoint(open_checkpoint(folder, FILE_DRIVER), folder, rank=0, num_ranks=1)
            policy = Policy(job, job.spec.model.source, torch.device("cpu"))
            load_weights(policy, folder)
            share = export_model(policy, partial, job.spec.model.source)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(to)
    return share


def _read_job(run: Path) -> RLJob:
    if not (run / FILE_JOB).is_file():
        raise UserError(f"{run}/{FILE_JOB} is missing: it says which model the checkpoint is of; `rljob run` writes it")
    job = load_job_file(run / FILE_JOB)
    if job.spec.model.source.startswith(("pvc://", "job://")):
        raise UserError(f"{run}: its model is on a claim ({job.spec.model.source}), which this process cannot read")
    storage = job.spec.object_storage
    for name, value in (("AWS_ENDPOINT_URL_S3", storage.endpoint), ("AWS_REGION", storage.region)):
        if value:
            os.environ[name] = value  # as in the job's Pods
    return load_model_settings(job, job.spec.model.source).job


def _without_training(job: RLJob) -> RLJob:
    """Return the job as a policy reads it that is only exported: without a reference model, a critic and GPUs, and
    without what its forward pass needs of a device or a compiler."""
    spec = job.spec
    algorithm = spec.algorithm.model_copy(
        update={"type": "grpo", "kl": spec.algorithm.kl.model_copy(update={"coefficient": 0.0})}
    )
    alone = {"replicas": 1, "gpus_per_replica": 0, "attention": "auto", "compile": "never"}
    trainer = spec.trainer.model_copy(update=alone)
    rollout = spec.rollout.model_copy(update={"placement": "separate"})
    return job.with_spec(algorithm=algorithm, trainer=trainer, rollout=rollout)


@contextlib.contextmanager
def _single_rank() -> Iterator[None]:
    """Within, this process is the only rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    run, step, to = arguments
    try:
        export_checkpoint(Path(run), int(step), Path(to))
    except (UserError, DamagedCheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.USER
    return ExitCode.SUCCEEDED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
