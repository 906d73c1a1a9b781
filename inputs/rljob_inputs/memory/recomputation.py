"""What the backward pass computes again, by the memory of a GPU: trainer.gradientCheckpointing. Pure.

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


def plan_choices(spec: RLJobSpec, work: Work) -> dict[Recomputation, int]:
    """Return what a GPU needs in an update, by choice."""
    others = roles.CUDA_BYTES + roles.ASLEEP_BYTES * spec.shares_trainer
    return {choice: others + plan_rank(replace(work, recomputation=choice))[0].num_bytes for choice in CHOICES}


def find_stronger(choice: Recomputation) -> tuple[Recomputation, ...]:
    """Return the choices that need less memory, the fastest first."""
    return CHOICES[CHOICES.index(choice) + 1 :]
