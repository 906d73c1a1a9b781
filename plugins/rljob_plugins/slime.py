"""slime, miles: reward functions of Samples with tokens, and of the project's arguments."""

import sys
from types import SimpleNamespace
from typing import Any, Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin
from rljob_api.functions.values import Sample, Value

_TYPES: Final = ("slime.utils.types", "miles.utils.types")
_UNKNOWN: Final = ("group_index", "reward", "loss_mask", "custom_rm_path", "reward_spec", "multimodal_inputs")
"""Fields that are None when a reward is called."""


def _read_sample(sample: Sample) -> Any:
    """Return slime's Sample with the fields that it has when a reward is called: of the project's own class where the
    function has imported that, since functions check it."""
    extra = values.read_extra_info(sample)
    given, sampled = values.read_prompt_ids(sample), values.read_completion_ids(sample)
    made = next((sys.modules[name].Sample() for name in _TYPES if name in sys.modules), SimpleNamespace())
    status = "truncated" if extra.get("truncated") else "completed"
    vars(made).update(
        index=extra.get("index"),
        prompt=values.RENDERED_PROMPT.read(sample),
        tokens=[*given, *sampled],
        response=sample["completion"],
        response_length=len(sampled),
        label=sample.get("ground_truth"),
        status=made.Status(status) if hasattr(made, "Status") else SimpleNamespace(value=status, name=status.upper()),
        metadata=extra,
        **dict.fromkeys(_UNKNOWN),
    )
    return made


def _entry(parameter: str, *, lists: bool) -> Convention:
    return Convention(
        "slime",
        f"reward_func(args, {parameter}, **kwargs)",
        ("args", parameter),
        {parameter: Value("sample", _read_sample, "tokens rendered")},
        lists=lists,
        whole=True,
        kwargs_parameter="args",
        kwargs_defaults={"custom_rm_path": None, "rm_type": None, "rm_url": None, "reward_key": None},
        key_option="reward_key",
    )


SIGNATURE: Final = SignaturePlugin(conventions=(_entry("samples", lists=True), _entry("sample", lists=False)))
