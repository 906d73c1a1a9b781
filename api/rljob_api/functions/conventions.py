"""How projects call their reward functions: one table, read by the static check and by the reward server.

An entry has the parameters that identify a form, what each parameter gets, whether arguments are lists with one element
per sample, and how the return value is read. `forms` matches a function with the table; workers implement VALUES and
RETURNS. A new form is one entry here and one test. Standard library only: workers import this file.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, Literal, NamedTuple

Signature = Literal[
    "auto", "verl", "trl", "openrlhf", "verifiers", "ms-swift", "slime", "areal", "open-instruct", "rllm",
    "reasoning-gym", "easyr1", "trinity-rft", "openai", "plain",
]  # fmt: skip
"""Values of function.signature: auto, and the names of CONVENTIONS."""

Value = Literal[
    "prompt",  # as in the data: a string, or chat messages
    "prompt_text",  # contents of the messages as lines
    "openrlhf_prompt",  # the same, each line with its end
    "completion",  # a string
    "completion_messages",  # a string for a string prompt, else one assistant message in a list
    "query",  # OpenRLHF: prompt and completion as one text
    "ground_truth",
    "data_source",
    "extra_info",
    "info",  # verifiers: the column info, else extra_info
    "task",  # verifiers: the column task, else data_source
    "state",  # verifiers: a dict with all of these
    "row",  # extra_info, with question and answer
    "entry",  # reasoning_gym: question, answer, metadata, and the other columns
    "task_info",  # rLLM: the row, with ground_truth and data_source
    "reward_input",  # EasyR1: response, response_length, ground_truth, and the other columns
    "sample",  # slime: an object with prompt, response, label, tokens, metadata
    "output_text",  # OpenAI: a dict with output_text
    "prompt_ids",
    "completion_ids",
]  # fmt: skip

Returns = Literal[
    "score",  # a number, a tuple that begins with it, or a dict or record with `score`
    "reward",  # the same with `reward` (or score)
    "overall",  # the same with `overall` (or score)
    "sum",  # a number, or a dict whose numbers are summed
    "numbers",  # for lists: a number or None per sample
    "rewards",  # OpenRLHF: a dict with `rewards`, `scores` and `extra_logs`, or only the rewards
]  # fmt: skip

TOKEN_VALUES: Final = frozenset({"prompt_ids", "completion_ids", "sample"})
"""Values that need token ids. The driver sends ids only to rewards that read them."""

STANDARD_NAMES: Final = (
    "prompt", "completion", "ground_truth", "data_source", "extra_info", "prompt_ids", "completion_ids",
)  # fmt: skip
"""What function.columns may name, besides extra_info.KEY."""


class Convention(NamedTuple):
    """One form of a project's reward functions."""

    name: str
    """Value of function.signature."""
    form: str
    """How it is written, for messages and docs."""
    markers: tuple[str, ...]
    """Parameters that the form has. `NAME: str` is a parameter with that annotation."""
    arguments: MappingProxyType[str, Value]
    """What each parameter gets. A function takes those that it names, or all with **kwargs (token ids only if it reads
    them)."""
    lists: bool = False
    """Whether each argument is a list with one element per sample."""
    returns: Returns = "score"
    """How a sample's part of the return value is read."""
    has_columns: bool = False
    """Whether any other parameter is a column of the data."""
    kwargs_parameter: str = ""
    """The parameter that gets function.kwargs as an object with attributes; empty: they are keyword arguments."""
    bases: tuple[str, ...] = ()
    """Base classes whose subclasses have this form, whatever their parameters."""
    constructor_parameter: str = ""
    """For classes: the constructor's parameter that gets function.factoryArgs as an object with attributes; empty: they
    are keyword arguments."""


def _entry(
    name: str, form: str, markers: str, arguments: dict[str, Value], **fields: object
) -> Convention:  # the table below stays readable
    return Convention(name, form, tuple(markers.split("|")), MappingProxyType(arguments), **fields)  # type: ignore[arg-type]


_TRL: Final[dict[str, Value]] = {
    "prompts": "prompt",
    "completions": "completion_messages",
    "answer": "ground_truth",
    "ground_truth": "ground_truth",
    "solution": "ground_truth",
    "data_source": "data_source",
    "prompt_ids": "prompt_ids",
    "completion_ids": "completion_ids",
}
_SWIFT: Final[dict[str, Value]] = _TRL | {
    "completions": "completion",
    "infer_requests": "completion",
    "ground_truths": "ground_truth",
    "response_token_ids": "completion_ids",
}
_PLAIN: Final[dict[str, Value]] = {
    "prompt": "prompt_text",
    "question": "prompt_text",
    "query": "prompt_text",
    "completion": "completion",
    "response": "completion",
    "answer": "ground_truth",
    "ground_truth": "ground_truth",
    "label": "ground_truth",
    "reference": "ground_truth",
    "target": "ground_truth",
    "data_source": "data_source",
    "extra_info": "extra_info",
    "prompt_ids": "prompt_ids",
    "completion_ids": "completion_ids",
}
_TRINITY: Final[dict[str, Value]] = {"response": "completion", "prompt": "prompt_text", "truth": "ground_truth"}
_OPEN_INSTRUCT: Final[dict[str, Value]] = {
    "tokenized_prediction": "completion_ids",
    "prediction": "completion",
    "label": "ground_truth",
    "query": "prompt_text",
}

CONVENTIONS: Final[tuple[Convention, ...]] = (
    _entry(
        "verl",
        "compute_score(data_source, solution_str, ground_truth, extra_info=None)",
        "solution_str",
        {
            "data_source": "data_source",
            "solution_str": "completion",
            "ground_truth": "ground_truth",
            "extra_info": "extra_info",
        },
    ),
    _entry(
        "verl",
        "compute_score(data_sources, solution_strs, ground_truths, extra_infos)",
        "solution_strs",
        {
            "data_sources": "data_source",
            "solution_strs": "completion",
            "ground_truths": "ground_truth",
            "extra_infos": "extra_info",
        },
        lists=True,
    ),
    _entry(
        "openrlhf",
        "reward_func(queries, prompts, labels, **kwargs)",
        "queries",
        {"queries": "query", "prompts": "openrlhf_prompt", "labels": "ground_truth"},
        lists=True,
        returns="rewards",
    ),
    _entry(
        "slime",
        "reward_func(args, samples, **kwargs)",
        "args|samples",
        {"samples": "sample"},
        lists=True,
        kwargs_parameter="args",
    ),
    _entry(
        "slime",
        "reward_func(args, sample, **kwargs)",
        "args|sample",
        {"sample": "sample"},
        kwargs_parameter="args",
    ),
    _entry(
        "easyr1",
        "compute_score(reward_inputs)",
        "reward_inputs",
        {"reward_inputs": "reward_input"},
        lists=True,
        returns="overall",
    ),
    _entry(
        "easyr1", "compute_score(reward_input)", "reward_input", {"reward_input": "reward_input"}, returns="overall"
    ),
    _entry(
        "easyr1",
        "compute_score(predicts, ground_truths)",
        "predicts",
        {"predicts": "completion", "ground_truths": "ground_truth"},
        lists=True,
        returns="overall",
    ),
    _entry(
        "easyr1",
        "compute_score(predict_str, ground_truth)",
        "predict_str",
        {"predict_str": "completion", "ground_truth": "ground_truth"},
        returns="overall",
    ),
    _entry(
        "open-instruct",
        "verifier(tokenized_prediction, prediction, label, query)",
        "prediction|label",
        _OPEN_INSTRUCT,
        bases=("VerifierFunction",),
        constructor_parameter="verifier_config",
    ),
    _entry(
        "rllm",
        "reward_fn(task_info, action)",
        "task_info|action",
        {"task_info": "task_info", "action": "completion"},
        returns="reward",
    ),
    _entry("reasoning-gym", "score_answer(answer, entry)", "answer|entry", {"answer": "completion", "entry": "entry"}),
    _entry("openai", "grade(sample, item)", "sample|item", {"sample": "output_text", "item": "row"}),
    _entry(
        "ms-swift",
        "ORM.__call__(completions, **columns)",
        "response_token_ids",
        _SWIFT,
        lists=True,
        returns="numbers",
        has_columns=True,
        bases=("ORM", "AsyncORM"),
        constructor_parameter="args",
    ),
    _entry(
        "areal",
        "reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **columns)",
        "prompt|completions",
        {
            "prompt": "prompt_text",
            "completions": "completion",
            "prompt_ids": "prompt_ids",
            "completion_ids": "completion_ids",
            "answer": "ground_truth",
        },
        has_columns=True,
    ),
    *(
        _entry(
            "verifiers",
            "reward(prompts, completions, answers, states, infos)",
            f"completions|{marker}",
            {
                "prompts": "prompt",
                "completions": "completion_messages",
                "answers": "ground_truth",
                "states": "state",
                "infos": "info",
                "tasks": "task",
            },
            lists=True,
            has_columns=True,
        )
        for marker in ("answers", "states", "infos", "tasks")
    ),
    _entry(
        "trl",
        "reward(prompts, completions, **columns)",
        "completions",
        _TRL,
        lists=True,
        returns="numbers",
        has_columns=True,
    ),
    _entry(
        "trinity-rft",
        "RewardFn.__call__(response, prompt, truth)",
        "response|truth",
        _TRINITY,
        returns="sum",
        bases=("RewardFn",),
    ),
    *(
        _entry("plain", f"reward(prompt, {marker.partition('|')[0]}, ground_truth)", marker, _PLAIN)
        for marker in ("completion|completion: str", "completion|ground_truth", "completion|label", "response")
    ),
    _entry(
        "verifiers",
        "reward(prompt, completion, answer, state, info)",
        "completion",
        {
            "prompt": "prompt",
            "completion": "completion_messages",
            "answer": "ground_truth",
            "state": "state",
            "info": "info",
            "task": "task",
        },
        has_columns=True,
    ),
    _entry(
        "trl",
        "reward(completion_ids, **columns)",
        "completion_ids",
        _TRL,
        lists=True,
        returns="numbers",
        has_columns=True,
    ),
)
"""In the order in which they are tried: a form with more markers precedes one with fewer."""

BY_COLUMNS: Final = Convention("columns", "any parameters, named in function.columns", (), MappingProxyType({}))
"""A function whose parameters are all named by function.columns and function.kwargs. With scope group: of lists."""

NOT_SENT: Final[MappingProxyType[str, str]] = MappingProxyType(
    {
        "reward_router_address": "verl passes the address of a reward model that it serves; set function.kwargs: "
        "{reward_router_address: 'HOST:PORT', reward_model_tokenizer: ''} and function.network: true, or use a judge",
        "reward_model_tokenizer": "verl passes the tokenizer of a reward model that it serves; set function.kwargs: "
        "{reward_model_tokenizer: ''} if the function does not use it, or use a judge",
        "environments": "it exists only in TRL's trainer; give it a default",
        "trainer_state": "it exists only in the project's trainer; give it a default",
        "parser": "in verifiers a Rubric passes it; set function.entrypoint to the Rubric",
        "runtime": "in verifiers it is the sandbox of the rollout; give it a default",
    }
)
"""Parameters of known forms that no value exists for, and what to do."""
