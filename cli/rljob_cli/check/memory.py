"""Whether a job fits the memory that it names: of GPUs by the labels of node pools, of Pods by their limits; and
whether one that asks for more GPUs than there are runs if its parts share them.

Joins the plan of rljob_inputs.memory with a job's models. Invariant: an error only where the job surely cannot fit;
what depends on the data is a warning.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rljob_api.errors import RLJobError
from rljob_api.manifest.job import RLJob
from rljob_api.quantity import show_bytes
from rljob_cli.check.jobfile import Finding
from rljob_cli.check.machine import Machine
from rljob_inputs.memory.gpus import count_all_gpus
from rljob_inputs.memory.parts import Need
from rljob_inputs.memory.plan import ModelFacts, Question, plan_memory
from rljob_inputs.memory.roles import GENERATE
from rljob_inputs.memory.sharing import Sharing, share_gpus
from rljob_inputs.models.defaults import resolve_job

if TYPE_CHECKING:
    from rljob_inputs.check import InputsReport


_GIB = 2**30


def build_question(
    job: RLJob, inputs: InputsReport, gpu_bytes: int | None = None, num_gpus: int | None = None
) -> Question:
    """Return what the plan may know about the job. `gpu_bytes`: of every GPU; None: by the labels of node pools.
    `num_gpus`: in all; None: enough."""
    models = {
        source: ModelFacts(config, inputs.num_parameters.get(path, 0))
        for path, source in job.spec.sources.items()
        if (config := inputs.model_configs.get(path))
    }
    return Question(inputs.resolve(job), models, gpu_bytes, _find_longest(job, inputs), num_gpus)


def _find_longest(job: RLJob, inputs: InputsReport) -> int | None:
    """Return the tokens of the longest training prompt; None unless all prompts of all sources were measured."""
    measured = {table.path: table.max for table in inputs.lengths if table.is_whole}
    paths = [each.path for each in job.spec.data.train_sources]
    return max(measured[path] for path in paths) if paths and measured.keys() >= set(paths) else None


def check_memory(question: Question) -> Iterator[Finding]:
    """Yield each need that exceeds what the job names, with both numbers and the fix."""
    for need in plan_memory(question):
        if need.fits is not False:
            continue
        path = _limit_path(need)
        yield Finding(path, f"{describe_misfit(need)}; {describe_remedy(need)}", not need.cannot_fit)


def describe_misfit(need: Need) -> str:
    """Return how much is needed and how much there is."""
    assert need.available is not None
    parts = sorted(need.peak.parts, key=lambda part: -part.num_bytes)
    largest = ", ".join(f"{part.name} {show_bytes(part.num_bytes)}" for part in parts[:3])
    if need.resource == "gpu":
        where, have = "a GPU", f"a GPU gives it {show_bytes(need.available)}"
    else:
        where, have = "a Pod", f"resources.limits.memory is {show_bytes(need.available)}"
    needed = f"may need {show_bytes(need.num_bytes)}"
    if need.cannot_fit:
        least, peak = show_bytes(need.certain_bytes), show_bytes(need.num_bytes)
        needed = f"needs {peak}" if least == peak else f"needs at least {least}, and {peak} at its peak"
    return f"{where} of {need.role} {needed} ({largest}), {have}"


_LESS = {
    "trainer": "fewer trainer.microBatchTokens, trainer.gradientCheckpointing: full, trainer.lora, "
    "trainer.offload: all",
    "rollout": "more rollout.gpusPerReplica, a lower rollout.maxModelLen",
}
"""By role: what takes less memory of a GPU, what costs least first."""


def describe_remedy(need: Need) -> str:
    """Return what would fit, or what takes less."""
    if need.resource == "host":
        return f"what fits: resources.limits.memory: {-(-need.num_bytes // _GIB)}Gi"
    engines = "a lower rollout.gpuMemoryUtilization, " if need.peak.name == GENERATE else ""
    less = f"what takes less: {engines}{_LESS[need.role]}; or " if need.role in _LESS else ""
    return f"{less}use more or larger GPUs, or a smaller model"


def _limit_path(need: Need) -> str:
    """Return the field to which a finding belongs."""
    if need.resource == "gpu":
        return need.path
    return f"{need.path}.resources.limits.memory" if need.role in ("head", "trainer", "rollout") else need.path


def share_machine(job: RLJob, locate: Callable[[str], str | None], machine: Machine) -> Sharing:
    """Return how the job runs on this machine's GPUs. `locate`: returns where the model of a source is; None: not here.

    Every caller gets the same answer: it depends on the manifest and the models' files, not on the data."""
    if count_all_gpus(job.spec) <= machine.num_gpus:
        return Sharing()
    from rljob_inputs.check import find_access  # imports the Hub's client
    from rljob_inputs.models.files import open_model, open_trained_model
    from rljob_inputs.models.own_settings import read_own_settings

    model, access, own = job.spec.model, find_access(job, os.environ), None
    facts: dict[str, ModelFacts] = {}
    for served in job.spec.served_models.values():
        with contextlib.suppress(RLJobError):
            if (location := locate(served.source)) is not None:
                facts[served.source] = ModelFacts(
                    open_model(location, served.revision, access).read_json("config.json")
                )
    with contextlib.suppress(RLJobError):  # other checks report it
        if (location := locate(model.source)) is not None:
            own = read_own_settings(open_trained_model(location, model.revision, access), model.chat_template)
            facts[model.source] = ModelFacts(own.config)
    return share_gpus(Question(resolve_job(job, own), facts, machine.gpu_bytes(), num_gpus=machine.num_gpus))


def describe_sharing(sharing: Sharing, num_gpus: int) -> str:
    """Return a line about what is changed."""
    gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    models = any(path != "rollout.placement" and path.endswith(".placement") for path in sharing.fields)
    who = "trainer, rollouts and models of services" if models else "trainer and rollouts"
    return f"{who} share this machine's {gpus}, in turns: {describe_fields(sharing)}"


def describe_fields(sharing: Sharing) -> str:
    """Return the changes of fields."""
    settings = [f"{path}: {value}" for path, value in sharing.fields.items()]
    return ", ".join([*settings, *(f"without {path}" for path in sharing.removed)])


def describe_obstacle(sharing: Sharing) -> str:
    """Return why the GPUs cannot be shared, with what would make it possible."""
    if sharing.misfit is None:
        return sharing.reason
    return f"{sharing.reason}: {describe_misfit(sharing.misfit)}; {describe_remedy(sharing.misfit)}"
