"""What becomes of the run's files: checkpoints, metrics, trajectories and the exported model. Pure.

Without a claim, or a copy in object storage, they are in the head's Pod alone. Invariant: steps are never lost without
a condition and an event that name the number of steps and the field to set.

The results of a job that only evaluates are in the termination message of the head's Pod. The Pod may be gone, or of
an image that writes something else: then the run's files alone have the results.
"""

from pydantic import TypeAdapter, ValidationError

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.status import MAX_FIGURES, EvaluationFigure
from rljob_api.wire.termination import RESULT_PREFIX
from rljob_core.backend import Event
from rljob_core.plan import conditions
from rljob_core.plan.conditions import Reasons
from rljob_core.plan.observed_job import ObservedJob, container_statuses

FIELD = "spec.checkpoint.persistentVolumeClaim"
_EITHER = f"{FIELD} or spec.checkpoint.storage"
_NEW_FOLDER = "NewRunFolder"
"""Reason of ProgressLost."""


def keeps_files(observed: ObservedJob) -> bool:
    """Whether the run's files outlive the head's Pod."""
    return observed.state.keeps_files or observed.job.spec.checkpoint.outlives_head


def add_progress_lost(observed: ObservedJob, true: Reasons) -> None:
    """Add the condition ProgressLost once the driver has found a new folder after completed steps. It then stays."""
    job, driver = observed.job, observed.state.driver
    before, old = job.status.progress, conditions.find(job.status, conditions.PROGRESS_LOST)
    if driver and driver.run_id and before.run_id not in ("", driver.run_id) and before.step > 0:
        is_kept = keeps_files(observed)
        why = _describe_place(job) if is_kept else "they were in the head's Pod"
        message = f"the run's files were lost at step {before.step}, because {why}; training starts again at step 0"
        true[conditions.PROGRESS_LOST] = (_NEW_FOLDER, message + ("" if is_kept else f"; set {_EITHER}"))
    elif old is not None:
        true[conditions.PROGRESS_LOST] = (old.reason, old.message)


def _describe_place(job: RLJob) -> str:
    """Why there is no folder where it should be: it was removed, or the job has named another place since."""
    claim, storage = job.spec.checkpoint.persistent_volume_claim, job.spec.checkpoint.storage
    if not (where := storage or (claim and f"the claim {claim.claim_name}")):
        return "the folder of the run was removed"
    return f"{where} does not have the folder of this run (if spec.checkpoint named another place, name it again)"


def add_warning(observed: ObservedJob, event: Event) -> Event:
    """The event; that of a job that begins to run, also after a suspension, warns if its files will be lost."""
    if event.reason != conditions.RUNNING or keeps_files(observed):
        return event
    return Event("Warning", event.reason, f"{event.message}; {describe_loss(observed.job)}")


def describe_loss(job: RLJob) -> str:
    """What is deleted with the head's Pod of a job whose files nothing keeps."""
    exports = job.spec.checkpoint.exported_steps != "never"
    files = "checkpoints, metrics" + (" and the exported model" if exports else "")
    files = files if job.spec.trains else "metrics and trajectories"  # an evaluation writes no model
    message = f"{FIELD} is not set: {files} are deleted with the head's Pod, also at the end of the job"
    return f"{message}; set it, or spec.checkpoint.storage, to keep them"


def describe_success(observed: ObservedJob) -> str:
    found = describe_figures(read_figures(observed))
    message = "the driver has finished all steps" if observed.job.spec.trains else "the model is evaluated"
    message += f": {found}" if found else ""
    return (
        message
        if keeps_files(observed)
        else f"{message}; its files were deleted with its Pod, because {FIELD} is not set"
    )


def describe_suspension(observed: ObservedJob) -> str:
    message = "spec.suspend is true; set it to false to resume from the checkpoint"
    step = observed.job.status.progress.step
    if keeps_files(observed) or not step:
        return message
    return f"spec.suspend is true; its {step} steps were lost, because {FIELD} is not set; resumed, it starts at step 0"


_FIGURES = TypeAdapter(list[EvaluationFigure])


def read_figures(observed: ObservedJob) -> list[EvaluationFigure]:
    """Return the results of the head's Pod that succeeded; empty for a job that trains, and if they are unknown."""
    if observed.job.spec.trains:
        return []
    for pod in observed.roles[0].pods:
        for status in container_statuses(pod):
            message = ((status.get("state") or {}).get("terminated") or {}).get("message") or ""
            if message.startswith(RESULT_PREFIX):
                try:
                    return _FIGURES.validate_json(message.removeprefix(RESULT_PREFIX))[:MAX_FIGURES]
                except ValidationError:
                    return []
    return []


def describe_figures(figures: list[EvaluationFigure]) -> str:
    """`eval: accuracy 0.412`; empty without any."""
    sets: dict[str, list[str]] = {}
    for figure in figures:
        value = "unknown" if figure.value is None else f"{figure.value:.3f}"
        sets.setdefault(figure.set, []).append(f"{figure.name} {value}")
    return "; ".join(f"{name}: {', '.join(values)}" for name, values in sets.items())
