"""verl's reward functions and reward managers."""

from typing import Any, Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, ObjectForm, SignaturePlugin
from rljob_api.functions.descriptions import Class
from rljob_api.functions.forms import FormError
from rljob_api.functions.values import Sample, Value

_RUN_SINGLE: Final = "run_single"
"""The method of reward managers."""


def count_turns(sample: Sample) -> int:
    """Return the turns as verl counts them: an answer and what it answers are two."""
    return 2 * len(values.read_extra_info(sample).get("turns") or [None])


def read_tool_fields(sample: Sample) -> dict[str, Any]:
    """Return what verl's agent loops add to extra_info: the rewards of turns, and of those that called tools."""
    turns = [turn for turn in values.read_extra_info(sample).get("turns") or () if turn.get("reward") is not None]
    of_tools = [turn["reward"] for turn in turns if turn.get("tool_calls")]
    return {"turn_scores": [turn["reward"] for turn in turns], "tool_rewards": of_tools}


def _read_extra_info(sample: Sample) -> dict[str, Any]:
    """Return the row's columns with what verl adds to them on the way to a reward function."""
    added = {**read_tool_fields(sample), "num_turns": count_turns(sample), "rollout_reward_scores": {}}
    return {**values.read_extra_info(sample), **added}


def _check_manager(found: Class, scope: str) -> None:
    if found.is_instance or scope == "group":
        what = "is an object; name the class" if found.is_instance else "scores one sample; remove scope"
        raise FormError(
            f"{found.name} is a reward manager of verl and {what}, or write\n"
            "    from verl.utils.reward_score import default_compute_score\n"
            "    def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            "        return default_compute_score(data_source, solution_str, ground_truth, extra_info)"
        )


_EXTRA_INFO: Final = Value("verl_extra_info", _read_extra_info)
_BEFORE_0_3: Final = (
    "Assistant:",
    "<|im_start|>assistant",
    "<|start_header_id|>assistant",
    "<|start_header_id|>assistant<|end_header_id|>",
)
"""Where the answer begins in what verl passed before March 2025 (verl#459)."""

SIGNATURE: Final = SignaturePlugin(
    conventions=(
        Convention(
            "verl",
            "compute_score(data_source, solution_str, ground_truth, extra_info=None)",
            ("solution_str",),
            {
                "data_source": values.DATA_SOURCE,
                "solution_str": values.COMPLETION,
                "ground_truth": values.GROUND_TRUTH,
                "extra_info": _EXTRA_INFO,
            },
            whole=True,
        ),
        Convention(
            "verl0.2",
            "compute_score(solution_str, ground_truth), where solution_str is prompt and answer",
            ("solution_str",),
            {
                "data_source": values.DATA_SOURCE,
                "solution_str": values.CONVERSATION,
                "ground_truth": values.GROUND_TRUTH,
                "extra_info": values.EXTRA_INFO,
                "step": Value("verl_step", lambda sample: values.read_step(sample) + 1, "steps"),  # it counts from 1
            },
            rank=90,
            whole=True,
            literals=_BEFORE_0_3,
        ),
        Convention(
            "verl",
            "compute_score(data_sources, solution_strs, ground_truths, extra_infos)",
            ("solution_strs",),
            {
                "data_sources": values.DATA_SOURCE,
                "solution_strs": values.COMPLETION,
                "ground_truths": values.GROUND_TRUTH,
                "extra_infos": _EXTRA_INFO,
            },
            lists=True,
            whole=True,
        ),
    ),
    objects=(
        ObjectForm(
            "manager",
            matches=lambda found: _RUN_SINGLE in found.methods,
            check=_check_manager,
            bind="rljob_plugins.verl.manager:bind",
        ),
    ),
    not_sent={
        "reward_router_address": "verl passes the address of a reward model that it serves; set function.kwargs: "
        "{reward_router_address: 'HOST:PORT', reward_model_tokenizer: ''} and function.network: true, or use a judge",
        "reward_model_tokenizer": "verl passes the tokenizer of a reward model that it serves; set function.kwargs: "
        "{reward_model_tokenizer: ''} if the function does not use it, or use a judge",
    },
)
