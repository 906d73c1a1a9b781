"""Whether a job fits the memory that it names: of GPUs by the labels of node pools, of Pods by their limits.

Joins the plan of rljob_inputs.memory with a job's models. Invariant: an error only where the job surely cannot fit;
what depends on the data is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rljob_api.manifest.job import RLJob
from rljob_api.quantity import show_bytes
from rljob_cli.check.jobfile import Finding
from rljob_inputs.memory.parts import Need
from rljob_inputs.memory.plan import ModelFacts, Question, plan_memory
from rljob_inputs.memory.remedies import find_remedy

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
    return max(measured[path] for path in paths) if measured.keys() >= set(paths) else None


def check_memory(question: Question) -> Iterator[Finding]:
    """Yield each need that exceeds what the job names, with both numbers and the fix."""
    for need in plan_memory(question):
        if need.fits is not False:
            continue
        path = _limit_path(need)
        yield Finding(path, f"{describe_misfit(need)}; {describe_remedy(question, need)}", not need.cannot_fit)


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


def describe_remedy(question: Question, need: Need) -> str:
    """Return what would fit."""
    if need.resource == "host":
        return f"what fits: resources.limits.memory: {-(-need.num_bytes // _GIB)}Gi"
    if remedy := find_remedy(question, need):
        return f"what fits: {remedy.describe()}"
    return "no single change of those that were tried makes it fit: use more or larger GPUs, or a smaller model"


def _limit_path(need: Need) -> str:
    """Return the field to which a finding belongs."""
    if need.resource == "gpu":
        return need.path
    return f"{need.path}.resources.limits.memory" if need.role in ("head", "trainer", "rollout") else need.path
