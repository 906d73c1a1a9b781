"""What the operator or `rljob run` gives to the head: environment variables, and the job's file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.read.pod_files import describe_job_file, load_job_file
from rljob_api.wire import contract
from rljob_trainer.temporary import TemporaryFolder


@dataclass(frozen=True)
class Environment:
    job: RLJob
    job_file: Path
    run_dir: Path
    address: str
    model: str
    train_data: tuple[str, ...]
    """Where this process finds spec.data.train, and the other sources of the mixture."""
    held_out_data: Mapping[str, str]
    """Sources by the name of an evaluation set."""
    model_step: str = ""
    """If set, `model` is the folder of another job's run, and this the step to start from: a number, last or best."""

    head_job_uid: str = ""
    grace_seconds: float = contract.GRACE_SECONDS

    @property
    def is_on_cluster(self) -> bool:
        """Whether this head's Pod is of a Kubernetes Job, and not of `rljob run`."""
        return bool(self.head_job_uid)

    @property
    def shown_job_file(self) -> Path:
        """The job's file without its secrets, for the files of the run and their copy."""
        path = _open_folder().path / contract.FILE_JOB
        path.write_text(describe_job_file(self.job_file), encoding="utf-8")
        return path

    @property
    def sources(self) -> dict[str, str]:
        """Where this process finds what the head reads or hands to the ranks, by field: spec.data.train.source."""
        spec = self.job.spec
        found = {"spec.model.source": self.model}
        if spec.trains:
            train = [each.path for each in spec.data.train_sources]
            found |= {f"{path}.source": at for path, at in zip(train, self.train_data, strict=True)}
        return found | {f"{each.data_path}.source": self.held_out_data[each.name] for each in spec.held_out_sets}

    def with_sources(self, pinned: Mapping[str, str]) -> Environment:
        """Return it with other locations of these sources, by field."""
        found, spec = {**self.sources, **pinned}, self.job.spec
        train = tuple(found[f"{each.path}.source"] for each in spec.data.train_sources) if spec.trains else ()
        return replace(
            self,
            model=found["spec.model.source"],
            model_step="",
            train_data=train or self.train_data,
            held_out_data={each.name: found[f"{each.data_path}.source"] for each in spec.held_out_sets},
        )


@cache
def _open_folder() -> TemporaryFolder:
    """Return the folder of what the head shows, which ends with the process."""
    return TemporaryFolder("job")


def read_environment(variables: dict[str, str]) -> Environment:
    """Parse the environment variables. Raise UserError if one is missing, or the job file is invalid."""
    needed = (
        contract.ENV_JOB_FILE, contract.ENV_RUN_DIR, contract.ENV_POD_IP, contract.ENV_MODEL, contract.ENV_TOKEN,
        contract.ENV_ROLLOUT_SERVICE, contract.ENV_REWARD_SERVICES,
    )  # fmt: skip
    missing = [name for name in needed if not variables.get(name)]
    if missing:
        raise UserError(
            f"environment variables not set: {', '.join(missing)}; start the head with the operator or `rljob run`"
        )
    train = variables.get(contract.ENV_TRAIN_DATA)  # a service has none
    return Environment(
        job=load_job_file(variables[contract.ENV_JOB_FILE]),
        job_file=Path(variables[contract.ENV_JOB_FILE]),
        run_dir=Path(variables[contract.ENV_RUN_DIR]),
        address=variables[contract.ENV_POD_IP],
        model=variables[contract.ENV_MODEL],
        train_data=(*([train] if train else []), *json.loads(variables.get(contract.ENV_MIX_DATA) or "[]")),
        held_out_data=json.loads(variables.get(contract.ENV_EVAL_DATA) or "{}"),
        model_step=variables.get(contract.ENV_MODEL_STEP, ""),
        head_job_uid=variables.get(contract.ENV_HEAD_JOB_UID, ""),
        grace_seconds=float(variables.get(contract.ENV_GRACE_SECONDS) or contract.GRACE_SECONDS),
    )
