"""Where the Pods of a job find spec.model: its source, or with job://NAME@STEP the run of another job on a claim. Pure.

The plan finds the claim (`rljob_core.plan.start_model`) and stores it in the status. The head chooses the step and
reports it; the status keeps it for a head that has lost the run's files.
Invariant: job:// is a claim that is mounted read-only like any other, so no other module here knows job://.
"""

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.sources import Source, parse_source
from rljob_api.manifest.status import StartModelStatus
from rljob_api.wire import contract

FIELD = "spec.model.source"


def parse_start(job: RLJob) -> Source | None:
    """The job whose model spec.model is, and its step; None for any other source, also for a wrong one."""
    try:
        source = parse_source(job.spec.model.source)
    except UserError:
        return None  # its own rule reports it
    return source if source.kind == "job" else None


def locate_model(job: RLJob) -> str:
    """The source of spec.model as Pods find it: for job://, the folder of the run on its claim. Raises UserError if the
    claim is not known."""
    start, placed = parse_start(job), job.status.start_model
    if start is None:
        return job.spec.model.source
    if placed is None or placed.job != start.path:
        raise UserError(f"{FIELD}: {job.spec.model.source}: the claim of RLJob {start.path} is not known")
    return f"pvc://{placed.claim}/{placed.job}"


def list_model_env(job: RLJob) -> dict[str, str]:
    """The variables that tell programs where the model is, and which step of a run."""
    env = {contract.ENV_MODEL: parse_source(locate_model(job)).container_path}
    start = parse_start(job)
    return env | ({contract.ENV_MODEL_STEP: start.step} if start else {})


def set_claim(job: RLJob, claim: str | None) -> RLJob:
    """The job whose status says on which claim the other job's files are; None: it starts from no job. A step that is
    known stays."""
    start, before = parse_start(job), job.status.start_model
    step = before.step if start and before and before.job == start.path else None
    return _set_placed(job, StartModelStatus(job=start.path, claim=claim, step=step) if start and claim else None)


def set_step(job: RLJob, step: int | None) -> RLJob:
    """The job whose status has the step that the head reports; None: the head has not chosen one."""
    placed = job.status.start_model
    if placed is None or step is None or placed.step == step:
        return job
    return _set_placed(job, placed.model_copy(update={"step": step}))


def _set_placed(job: RLJob, placed: StartModelStatus | None) -> RLJob:
    return job.model_copy(update={"status": job.status.model_copy(update={"start_model": placed})})


def with_any_claim(job: RLJob) -> RLJob:
    """The job as it can be built without its cluster. The claim is its own, or one with the other job's name."""
    start, placed, own = parse_start(job), job.status.start_model, job.spec.checkpoint.persistent_volume_claim
    if start is None or (placed is not None and placed.job == start.path):
        return job
    return set_claim(job, own.claim_name if own else start.path)
