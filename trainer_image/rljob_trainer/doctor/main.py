"""The doctor's command line. With $RLJOB_JOB_FILE, as in a job's Pod, it asks for what the job asks for."""

import argparse
import os
from collections.abc import Sequence

from rljob_api.read.pod_files import load_job_file
from rljob_api.wire.contract import ENV_JOB_FILE
from rljob_trainer.doctor.compute import check_compute
from rljob_trainer.doctor.machine import check_machine
from rljob_trainer.doctor.report import format_json, format_table, has_failed


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    num_gpus, field = options.gpus, "--gpus"
    if num_gpus is None and (path := os.environ.get(ENV_JOB_FILE)):
        spec = load_job_file(path).spec
        num_gpus = (spec.trainer if options.role == "trainer" else spec.rollout).gpus_per_replica
        field = f"spec.{options.role}.gpusPerReplica"
    checks = [*check_compute(num_gpus, field, options.ranks), *check_machine()]
    print(format_json(checks) if options.output == "json" else format_table(checks), flush=True)
    return int(has_failed(checks))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rljob_trainer.doctor",
        description="Check what trainers and rollouts need of a node and an image. Exits with 1 if a check fails.",
    )
    parser.add_argument("--gpus", type=int, help="GPUs that the Pod was asked for; default: as the job, or all it sees")
    parser.add_argument("--role", choices=("trainer", "rollout"), default="trainer", help="whose GPUs, in a job's Pod")
    parser.add_argument("--ranks", type=int, help="processes of the all-reduce; default: one per GPU")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    return parser.parse_args(arguments)
