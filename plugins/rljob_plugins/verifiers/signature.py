"""verifiers' reward functions, Rubrics and Task classes."""

from typing import Any, Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, ObjectForm, SignaturePlugin
from rljob_api.functions.descriptions import Class
from rljob_api.functions.forms import FormError
from rljob_api.functions.values import Sample, Value

_RUBRIC_METHODS: Final = frozenset({"_get_reward_funcs", "get_reward_funcs"})
"""A Rubric has one, depending on its version."""


def _read_info(sample: Sample) -> Any:
    """Return the column info, else extra_info."""
    extra = values.read_extra_info(sample)
    return extra.get("info", extra)


def _read_task(sample: Sample) -> Any:
    """Return the column task, else data_source."""
    return values.read_extra_info(sample).get("task", values.read_data_source(sample))


def _read_state(sample: Sample) -> dict[str, Any]:
    """Return the state of a rollout: what a reward may read without an environment."""
    fields = {"prompt": sample["prompt"], "task": _read_task(sample), "info": _read_info(sample)}
    answer, row = sample.get("ground_truth"), values.read_extra_info(sample)
    own = {"completion": values.read_completion_messages(sample), "answer": answer, "trajectory": []}
    return {**row, **fields, **own, "input": {**row, **fields, "answer": answer}}


def _is_rubric(found: Class) -> bool:
    named = "Rubric" in found.bases and "__call__" not in found.methods
    return named or bool(_RUBRIC_METHODS.intersection(found.methods))


def _is_task(found: Class) -> bool:
    return "Task" in found.bases and "__call__" not in found.methods


def _check_task(found: Class, scope: str) -> None:
    """A reward that does not run would be missing in the sum, so it is refused."""
    for name in sorted(found.rewards):
        if "runtime" in found.methods[name].required:
            shown = f"{found.name}.{found.methods[name].show()}"
            raise FormError(
                f"{shown} requires runtime, which exists only in a rollout of verifiers; write runtime=None, and score "
                "from the trace without it"
            )
    if not found.rewards:
        raise FormError(f"{found.name} has no method marked with @reward; add one")


_INFO, _TASK, _STATE = Value("info", _read_info), Value("task", _read_task), Value("state", _read_state)


def _group(marker: str) -> Convention:
    return Convention(
        "verifiers",
        "reward(prompts, completions, answers, states, infos)",
        ("completions", marker),
        {
            "prompts": values.PROMPT,
            "completions": values.COMPLETION_MESSAGES,
            "answers": values.GROUND_TRUTH,
            "states": _STATE,
            "infos": _INFO,
            "tasks": _TASK,
        },
        rank=210,
        lists=True,
        whole=True,
        has_columns=True,
    )


GROUP: Final = _group("answers")
SAMPLE: Final = Convention(
    "verifiers",
    "reward(prompt, completion, answer, state, info)",
    ("completion",),
    {
        "prompt": values.PROMPT,
        "completion": values.COMPLETION_MESSAGES,
        "answer": values.GROUND_TRUTH,
        "state": _STATE,
        "info": _INFO,
        "task": _TASK,
    },
    rank=600,
    whole=True,
    has_columns=True,
)

SIGNATURE: Final = SignaturePlugin(
    conventions=(GROUP, *(_group(marker) for marker in ("states", "infos", "tasks")), SAMPLE),
    objects=(
        ObjectForm("rubric", _is_rubric, lambda found, scope: None, "rljob_plugins.verifiers.rubric:bind"),
        ObjectForm("task", _is_task, _check_task, "rljob_plugins.verifiers.task:bind"),
    ),
    not_sent={
        "parser": "in verifiers a Rubric passes it; set function.entrypoint to the Rubric",
        "runtime": "in verifiers it is the sandbox of the rollout; give it a default",
    },
)
