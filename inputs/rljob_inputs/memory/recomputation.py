"""What the backward pass computes again, by the memory of a GPU: trainer.gradientCheckpointing, and the logits. Pure.

`rljob plan` and the ranks ask the same function. Invariant: its answer depends only on the job, the model's shape and
the memory of the smallest GPU, so all ranks of a job, with the same three, decide alike.
"""

from dataclasses import replace

from rljob_api.manifest.job import RLJobSpec
from rljob_inputs.memory import limits, roles
from rljob_inputs.memory.trainer import Recomputation, Work, plan_rank

CHOICES: tuple[Recomputation, ...] = ("none", "selective", "full")
"""From the fastest to the one that needs least memory."""


def choose_recomputation(spec: RLJobSpec, work: Work, gpu_bytes: int | None) -> Recomputation:
    """Return the setting, or for auto the first choice with which an update leaves some of the GPU free. `gpu_bytes`:
    of the smallest. None: unknown, so the one that needs least."""
    setting = spec.trainer.gradient_checkpointing
    if setting != "auto":
        return setting
    if not work.on_gpu:
        return "none"
    available = (gpu_bytes or 0) * limits.UPDATE_SHARE_OF_DEVICE_MEMORY
    needs = plan_choices(spec, work)
    return next((choice for choice in CHOICES if needs[choice] <= available), CHOICES[-1])


def choose_kept_logits(spec: RLJobSpec, work: Work, gpu_bytes: int | None) -> int:
    """Return the size of the logits that are kept: all of a micro-batch, if an update then leaves some of the GPU free,
    else those of one block."""
    keeping = replace(work, kept_logits_bytes=max(work.all_logits_bytes, limits.LOGITS_BLOCK_BYTES))
    fits = work.on_gpu and leaves_some_free(spec, keeping, gpu_bytes)
    return keeping.kept_logits_bytes if fits else limits.LOGITS_BLOCK_BYTES


def leaves_some_free(spec: RLJobSpec, work: Work, gpu_bytes: int | None) -> bool:
    """Whether an update leaves some of the GPU free."""
    return _plan_update(spec, work) <= (gpu_bytes or 0) * limits.UPDATE_SHARE_OF_DEVICE_MEMORY


def plan_choices(spec: RLJobSpec, work: Work) -> dict[Recomputation, int]:
    """Return what a GPU needs in an update, by choice."""
    return {choice: _plan_update(spec, replace(work, recomputation=choice)) for choice in CHOICES}


def _plan_update(spec: RLJobSpec, work: Work) -> int:
    return roles.CUDA_BYTES + roles.ASLEEP_BYTES * spec.shares_trainer + plan_rank(work)[0].num_bytes


def find_stronger(choice: Recomputation) -> tuple[Recomputation, ...]:
    """Return the choices that need less memory, the fastest first."""
    return CHOICES[CHOICES.index(choice) + 1 :]
