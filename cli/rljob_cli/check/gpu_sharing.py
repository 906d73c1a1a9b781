"""Whether a job that asks for more GPUs than there are runs if its parts share them, and what to say."""

import contextlib
import os
from collections.abc import Callable

from rljob_api.errors import RLJobError
from rljob_api.manifest.job import RLJob
from rljob_cli.check.machine import Machine
from rljob_cli.check.memory import describe_misfit, describe_remedy
from rljob_inputs.memory.gpu_counts import count_all_gpus
from rljob_inputs.memory.plan import ModelFacts, Question
from rljob_inputs.memory.sharing import Sharing, share_gpus
from rljob_inputs.models.defaults import resolve_job


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
    if sharing.misfit is None or sharing.question is None:
        return sharing.reason
    remedy = describe_remedy(sharing.question, sharing.misfit)
    return f"{sharing.reason}: {describe_misfit(sharing.misfit)}; {remedy}"
