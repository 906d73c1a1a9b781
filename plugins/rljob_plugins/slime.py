"""slime, miles: reward functions of Samples with tokens, and of the project's arguments."""

from types import SimpleNamespace
from typing import Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin
from rljob_api.functions.values import Sample, Value


def _read_sample(sample: Sample) -> SimpleNamespace:
    """Return the fields of slime's Sample that exist when a reward is called."""
    extra = values.read_extra_info(sample)
    given, sampled = values.read_prompt_ids(sample), values.read_completion_ids(sample)
    status = SimpleNamespace(value="truncated" if extra.get("truncated") else "completed")
    status.name = status.value.upper()
    return SimpleNamespace(
        index=extra.get("index"),
        group_index=None,
        prompt=sample["prompt"],
        tokens=[*given, *sampled],
        response=sample["completion"],
        response_length=len(sampled),
        label=sample.get("ground_truth"),
        reward=None,
        loss_mask=None,
        status=status,
        metadata=extra,
        custom_rm_path=None,
        reward_spec=None,
        multimodal_inputs=None,
    )


def _entry(parameter: str, *, lists: bool) -> Convention:
    return Convention(
        "slime",
        f"reward_func(args, {parameter}, **kwargs)",
        ("args", parameter),
        {parameter: Value("sample", _read_sample, "tokens")},
        lists=lists,
        whole=True,
        kwargs_parameter="args",
        kwargs_defaults={"custom_rm_path": None, "rm_type": None, "rm_url": None, "reward_key": None},
        key_option="reward_key",
    )


SIGNATURE: Final = SignaturePlugin(conventions=(_entry("samples", lists=True), _entry("sample", lists=False)))
