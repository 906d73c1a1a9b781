"""What a job leaves to its model: lengths, sampling and end tokens, by the files of published models."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_inputs.models.chat_template import TemplateSource
from rljob_inputs.models.defaults import MAX_THINKING_TOKENS, MAX_TOKENS, OwnSettings, resolve
from tests.support.chat_templates import FAMILIES
from tests.support.model_templates import DEEPSEEK_R1, GEMMA3, GPT_OSS, HYBRID_QWEN3

CHATML = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}


def spec_of(**sections: Any) -> RLJobSpec:
    base: dict[str, Any] = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t"}, "eval": {"source": "/e"}},
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
    }
    for name, value in sections.items():
        base[name] = {**base.get(name, {}), **value}
    return RLJob.model_validate({"metadata": {"name": "j"}, "spec": base}).spec


def own_of(
    template: str | None = None,
    generation: dict[str, Any] | None = None,
    *,
    context: int | None = None,
    eos: str | None = None,
    special: dict[str, int] | None = None,
    config: dict[str, Any] | None = None,
) -> OwnSettings:
    length = {} if context is None else {"max_position_embeddings": context}
    return OwnSettings(
        config={**length, **(config or {})},
        generation=generation or {},
        template=TemplateSource(template, {"bos_token": "<s>"}) if template else None,
        template_place="chat_template.jinja" if template else "",
        eos_token=eos,
        special_tokens=special or {},
    )


QWEN3 = own_of(
    HYBRID_QWEN3,
    {"do_sample": True, "eos_token_id": [151645, 151643], "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    context=40960,
    eos="<|im_end|>",
    special=CHATML,
)
QWEN25 = own_of(
    FAMILIES["qwen25"],
    {
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "repetition_penalty": 1.1,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    },
    context=32768,
    eos="<|im_end|>",
    special=CHATML,
)
QWEN25_BASE = own_of(
    FAMILIES["qwen25"],
    {"do_sample": False, "eos_token_id": 151643, "max_new_tokens": 2048},
    context=131072,
    eos="<|endoftext|>",
    special=CHATML,
)
LLAMA3 = own_of(
    FAMILIES["llama3"],
    {"do_sample": True, "eos_token_id": [128001, 128008, 128009], "temperature": 0.6, "top_p": 0.9},
    context=131072,
    eos="<|eot_id|>",
    special={"<|end_of_text|>": 128001, "<|eom_id|>": 128008, "<|eot_id|>": 128009},
)
GPT_OSS_20B = own_of(
    GPT_OSS,
    {"do_sample": True, "eos_token_id": [200002, 199999, 200012]},
    context=131072,
    eos="<|return|>",
    special={"<|endoftext|>": 199999, "<|return|>": 200002, "<|end|>": 200007, "<|call|>": 200012},
)
SMOLLM2 = own_of(
    FAMILIES["smollm2"],
    {"eos_token_id": 2},
    context=8192,
    eos="<|im_end|>",
    special={"<|im_start|>": 1, "<|im_end|>": 2},
)
GEMMA3_4B = own_of(
    GEMMA3,
    {"do_sample": True, "eos_token_id": [1, 106], "top_k": 64, "top_p": 0.95},
    config={"text_config": {"max_position_embeddings": 131072}},
    eos="<eos>",
    special={"<eos>": 1, "<bos>": 2, "<start_of_turn>": 105, "<end_of_turn>": 106},
)
R1_DISTILL = own_of(
    DEEPSEEK_R1,
    {"do_sample": True, "eos_token_id": 151643, "temperature": 0.6, "top_p": 0.95},
    context=131072,
    eos="<|end_of_sentence|>",
    special={"<|end_of_sentence|>": 151643, "<|User|>": 151644, "<|Assistant|>": 151645},
)
NO_TEMPLATE = own_of(context=2048, config={"eos_token_id": 0}, eos="</s>", special={"</s>": 0})
GREEDY = {"temperature": 0.0}

# maxTokens, sampling of an evaluation, texts that end an answer, in addition to the manifest's
MODELS = {
    "qwen3": (QWEN3, 16384, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}, []),
    "qwen2.5-instruct": (QWEN25, 512, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}, []),
    "qwen2.5, a base model with a template": (QWEN25_BASE, 2048, GREEDY, ["<|im_end|>"]),
    "llama 3.1": (LLAMA3, 512, {"temperature": 0.6, "top_p": 0.9}, []),
    "gpt-oss": (GPT_OSS_20B, 16384, {"temperature": 1.0}, []),
    "smollm2": (SMOLLM2, 512, GREEDY, []),
    "gemma 3": (GEMMA3_4B, 512, {"temperature": 1.0, "top_p": 0.95, "top_k": 64}, []),
    "deepseek-r1-distill": (R1_DISTILL, 16384, {"temperature": 0.6, "top_p": 0.95}, []),
    "no template": (NO_TEMPLATE, 512, GREEDY, []),
}


@pytest.mark.parametrize("name", MODELS)
def test_open_settings_are_those_of_the_models_files(name):
    own, max_tokens, sampling, stop = MODELS[name]
    spec = resolve(spec_of(), own).spec
    rollout, evaluation = spec.rollout.sampling, spec.evaluation.sampling
    assert (rollout.max_tokens, rollout.stop) == (max_tokens, stop)
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1.0, 0), "the loss assumes it"
    chosen = evaluation.model_dump(include={"temperature", "top_p", "top_k"})
    assert chosen == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **sampling}
    assert (evaluation.max_tokens, evaluation.stop) == (max_tokens, stop)


@pytest.mark.parametrize("name", MODELS)
def test_a_resolved_spec_stays_as_it_is(name):
    own = MODELS[name][0]
    once = resolve(spec_of(), own).spec
    assert resolve(once, own).spec == once
    assert resolve(once, None).spec == once, "whatever the program knows of the model"


def test_what_the_manifest_sets_stays():
    given = {"temperature": 0.9, "maxTokens": 100, "stop": ["END"]}
    spec = resolve(
        spec_of(rollout={"sampling": given}, evaluation={"sampling": {"temperature": 0.2, "maxTokens": 50}}), QWEN3
    )
    assert spec.spec.rollout.sampling.model_dump(by_alias=True, exclude_defaults=True) == given
    evaluation = spec.spec.evaluation.sampling
    assert (evaluation.temperature, evaluation.top_p, evaluation.max_tokens) == (0.2, 1.0, 50)
    fields = [each.field for each in spec.from_model]
    assert "spec.rollout.sampling.maxTokens" not in fields
    assert "spec.evaluation.sampling" not in fields


def test_an_evaluation_with_its_own_sampling_has_the_length_and_the_ends_of_training():
    resolved = resolve(spec_of(evaluation={"sampling": {"stop": ["END"]}}), QWEN25_BASE)
    sampling = resolved.spec.evaluation.sampling
    assert (sampling.max_tokens, sampling.stop) == (2048, ["END", "<|im_end|>"])
    shown = {each.field: each.source for each in resolved.from_model}
    assert shown["spec.evaluation.sampling.maxTokens"] == "as rollout.sampling.maxTokens"


@pytest.mark.parametrize(
    ("own", "sections", "expected", "source"),
    [
        (QWEN3, {}, 16384, "chat_template.jinja: the model may think before it answers"),
        (
            QWEN3,
            {"data": {"chatTemplateArguments": {"enable_thinking": False}}},
            512,
            "chat_template.jinja: data.chatTemplateArguments switches thinking off",
        ),
        (QWEN25, {}, 512, "chat_template.jinja: the model does not think"),
        (QWEN25_BASE, {}, 2048, "generation_config.json: max_new_tokens"),
        (QWEN3, {"data": {"format": "text"}}, 512, "prompts without a chat template"),
        (
            QWEN3,
            {"rollout": {"maxModelLen": 4096}},
            2048,
            "chat_template.jinja: the model may think before it answers; half of rollout.maxModelLen 4096",
        ),
        (
            QWEN3,
            {"rollout": {"maxModelLen": 4096}, "data": {"maxPromptTokens": 500}},
            3596,
            "chat_template.jinja: the model may think before it answers; "
            "rollout.maxModelLen 4096 - data.maxPromptTokens 500",
        ),
        (
            own_of(FAMILIES["smollm2"], {"max_new_tokens": 2048}, context=2048),
            {},
            1024,
            "generation_config.json: max_new_tokens; half of the context 2048",
        ),
        (own_of(FAMILIES["smollm2"], context=100), {"data": {"maxPromptTokens": 100}}, 1, None),
        (QWEN3, {"rollout": {"extraArgs": ["--max-model-len=99999999"]}}, 16384, None),
        (None, {}, 512, "the model's files are unknown"),
        (None, {"rollout": {"maxModelLen": 64}}, 32, None),
    ],
)
def test_the_length_of_an_answer_leaves_room_for_the_prompt(own, sections, expected, source):
    resolved = resolve(spec_of(**sections), own)
    assert resolved.spec.rollout.sampling.max_tokens == expected
    shown = {each.field: each for each in resolved.from_model}.get("spec.rollout.sampling.maxTokens")
    assert (shown is None) == (own is None), "what is unknown is not shown as known"
    if shown is not None and source is not None:
        assert (shown.value, shown.source) == (expected, source)


@pytest.mark.parametrize(
    "generation",
    [
        {"temperature": 0.6},
        {"do_sample": False, "temperature": 0.6},
        {"do_sample": "yes", "temperature": 0.6},
        {"do_sample": True, "temperature": 0},
        {"do_sample": True, "temperature": "hot"},
        {"do_sample": True, "temperature": math.inf},
        {"do_sample": True, "temperature": math.nan},
        {"do_sample": True, "temperature": 1e300},
    ],
)
def test_evaluation_is_greedy_unless_the_model_says_how_to_sample(generation):
    evaluation = resolve(spec_of(), own_of(generation=generation)).spec.evaluation.sampling
    assert (evaluation.temperature, evaluation.top_p, evaluation.top_k) == (0.0, 1.0, 0)


def test_values_without_an_effect_or_of_another_type_are_left_out():
    own = own_of(generation={"do_sample": True, "top_p": 1.5, "top_k": 10**30, "min_p": 0.1})
    evaluation = resolve(spec_of(), own).spec.evaluation.sampling
    assert (evaluation.temperature, evaluation.top_p, evaluation.top_k) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("own", "ids"),
    [
        (QWEN3, [151645, 151643]),
        (GPT_OSS_20B, [200002, 199999, 200012]),
        (GEMMA3_4B, [1, 106]),
        (NO_TEMPLATE, [0]),
        (own_of(generation={"do_sample": True}, config={"eos_token_id": 5}), []),
        (own_of(config={"text_config": {"eos_token_id": [5, 6]}}), [5, 6]),
        (own_of(generation={"eos_token_id": 7}, eos="</s>", special={"</s>": 2}), [2, 7]),
    ],
)
def test_end_tokens_are_those_at_which_vllm_ends(own, ids):
    assert own.end_ids == ids


@pytest.mark.parametrize(
    ("sections", "stop"),
    [
        ({}, ["<|im_end|>"]),
        ({"rollout": {"sampling": {"stop": ["<|im_end|>"]}}}, ["<|im_end|>"]),
        ({"data": {"format": "text"}}, []),
    ],
)
def test_a_base_model_ends_where_its_template_does(sections, stop):
    assert resolve(spec_of(**sections), QWEN25_BASE).spec.rollout.sampling.stop == stop


def test_people_see_field_value_and_file():
    shown = [
        (each.field.removeprefix("spec."), each.value, each.source) for each in resolve(spec_of(), QWEN3).from_model
    ]
    assert shown == [
        ("rollout.maxModelLen", 40960, "config.json: the model's context"),
        ("rollout.sampling.maxTokens", 16384, "chat_template.jinja: the model may think before it answers"),
        (
            "rollout.sampling.temperature",
            1.0,
            "training needs the whole distribution; generation_config.json has temperature 0.6, top_p 0.95, top_k 20",
        ),
        (
            "rollout.sampling.stop",
            ["<|im_end|>", "<|endoftext|>"],
            "generation_config.json and the tokenizer: end of sequence",
        ),
        ("evaluation.sampling", {"temperature": 0.6, "topP": 0.95, "topK": 20}, "generation_config.json: do_sample"),
    ]
    json.dumps(shown)
    shown = {each.field: each for each in resolve(spec_of(), QWEN25_BASE).from_model}
    assert shown["spec.rollout.sampling.stop"].value == ["<|endoftext|>", "<|im_end|>"]
    assert shown["spec.rollout.sampling.stop"].source.endswith("; chat_template.jinja: ends an answer with <|im_end|>")
    assert shown["spec.evaluation.sampling"].source == "greedy: generation_config.json has do_sample False"
    assert "spec.rollout.sampling.temperature" not in shown
    reasons = [({"top_p": 0.9}, "no do_sample"), ({"do_sample": True, "temperature": 0}, "the temperature 0")]
    for generation, why in reasons:
        shown = {each.field: each for each in resolve(spec_of(), own_of(generation=generation)).from_model}
        assert shown["spec.evaluation.sampling"].source == f"greedy: generation_config.json has {why}"


def test_without_evaluation_data_its_sampling_is_not_shown():
    spec = spec_of().model_copy(deep=True)
    spec.data.eval = None
    assert "spec.evaluation.sampling" not in [each.field for each in resolve(spec, QWEN3).from_model]


def test_limits_are_those_of_the_reference():
    assert (MAX_TOKENS, MAX_THINKING_TOKENS) == (512, 16384), "docs and field descriptions name them"
