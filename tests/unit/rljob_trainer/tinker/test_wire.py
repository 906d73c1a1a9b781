"""What the SDK sends is read or refused with a sentence, and it reads what the service writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from rljob_trainer.episodes.types import Completion, told_dtype
from rljob_trainer.tinker.wire import (
    ModelLimits,
    RefusedError,
    parse,
    parse_batch,
    read_adam,
    read_batch,
    read_sample,
    write_batch,
    write_sample,
)

LIMITS = ModelLimits(context=8, vocabulary=100)
TOKENS = [5, 6, 7, 8]
RL = {"target_tokens": [0, 7, 8, 9], "logprobs": [0.0, -1.0, -2.0, -3.0], "advantages": [0.0, 1.0, 1.0, 1.0]}


def datum(tokens: list[int] = TOKENS, **inputs: Any) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def encode(*data: types.Datum, loss: str = "cross_entropy", config: dict[str, Any] | None = None) -> bytes:
    given = types.ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=config)
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id="s:train:0", seq_id=3)
    return forward_backward_request_to_proto(request).SerializeToString()


def test_a_batch_has_a_row_for_each_datum_whose_targets_need_not_follow():
    body = encode(datum(**RL), loss="ppo", config={"clip_low_threshold": 0.7})
    request = parse_batch(body)
    assert (request.model_id, request.seq_id) == ("s:train:0", 3)
    batch = read_batch(request, LIMITS)
    assert (batch.loss, batch.settings, batch.backward) == ("ppo", {"clip_low_threshold": 0.7}, True)
    [row], [facts] = batch.rows, batch.facts
    assert row.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert row.loss_mask.tolist() == [False, True, True, True, True]
    assert facts["targets"].tolist() == [0, 7, 8, 9], "the first target is not the token that follows"
    assert facts["logprobs"].tolist() == [0.0, -1.0, -2.0, -3.0]
    assert facts.keys() == {"targets", "logprobs", "advantages"}


def test_weights_of_cross_entropy_are_one_unless_given():
    rows = read_batch(
        parse_batch(encode(datum(target_tokens=[6, 7, 8, 9]), datum(target_tokens=TOKENS, weights=[0, 1, 0, 2]))),
        LIMITS,
    )
    assert [facts["weights"].tolist() for facts in rows.facts] == [[1, 1, 1, 1], [0, 1, 0, 2]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (encode(datum(**RL), loss="gspo"), "loss_fn: gspo is not supported; use cross_entropy, importance_sampling"),
        (encode(datum(**RL), loss="custom", config={"loss_id": "l"}), "custom runs in the client here"),
        (encode(datum(**RL), loss="ppo", config={"beta": 1.0}), "ppo has no beta; it has clip_low_threshold"),
        (
            encode(datum(**RL), loss="cispo", config={"clip_low_threshold": "0.7"}),
            "low_threshold: must be a finite number",
        ),
        (encode(datum(**RL), loss="ppo", config={"clip_high_threshold": float("nan")}), "must be a finite number"),
        (encode(datum(target_tokens=TOKENS), loss="ppo"), "data[0].loss_fn_inputs: ppo needs logprobs"),
        (encode(datum(**RL)), "data[0].loss_fn_inputs: cross_entropy has no advantages; it has target_tokens"),
        (
            encode(datum(target_tokens=[1, 2])),
            "target_tokens: must have a value for each token of model_input, 4, got 2",
        ),
        (encode(datum(target_tokens=[1, 2, 3, 100])), "target_tokens: the model has the tokens 0 to 99"),
        (
            encode(datum(target_tokens=types.TensorData(data=[1.0, 2.5, 3.0, 4.0], dtype="float32", shape=[4]))),
            "target_tokens: the model has the tokens 0 to 99",
        ),
        (encode(datum([5, -1, 6, 7], target_tokens=TOKENS)), "model_input: the model has the tokens 0 to 99"),
        (encode(datum([1] * 9, target_tokens=[1] * 9)), "has 9 tokens; from 1 to 8 are possible"),
        (encode(datum(target_tokens=np.ones((4, 2), np.int64))), "must have one dimension"),
        (encode(datum(target_tokens=TOKENS, weights=[1.0, float("nan"), 1.0, 1.0])), "weights: must be finite numbers"),
        (encode(), "data: is empty"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_place(body, message):
    with pytest.raises(RefusedError) as caught:
        read_batch(parse_batch(body), LIMITS)
    assert message in str(caught.value)


def test_the_sdk_reads_the_result_of_a_batch():
    output = deserialize_forward_backward_output(write_batch([np.array([-1, -2]), np.array([-3])], 6.5))
    assert [each["logprobs"].tolist() for each in output.loss_fn_outputs] == [[-1.0, -2.0], [-3.0]]
    assert output.metrics == {"loss:sum": 6.5}


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("beta1", 1.0, "at least 0 and less than 1, got 1.0"),
        ("beta2", -0.5, "at least 0 and less than 1"),
        ("eps", 0.0, "at least 1e-30 and less than inf, got 0.0"),
        ("weight_decay", float("nan"), "at least 0"),
        ("grad_clip_norm", -1.0, "at least 0"),
        ("learning_rate", float("nan"), "at least -1e"),
        ("learning_rate", float("inf"), "at least -1e"),
    ],
)
def test_settings_of_an_update_that_would_spoil_the_weights_are_refused(name, value, bounds):
    assert read_adam(types.AdamParams(beta2=0.0, learning_rate=-1.0))["learning_rate"] == -1.0
    with pytest.raises(RefusedError, match=f"optim_params.{name}: must be {bounds}"):
        read_adam(types.AdamParams(**{name: value}))


def ask(tokens: list[int] = TOKENS, **changes: Any) -> types.SampleRequest:
    params = types.SamplingParams(**changes.pop("params", {}))
    return types.SampleRequest(prompt=types.ModelInput.from_ints(tokens), sampling_params=params, **changes)


def test_settings_of_a_sample_are_those_of_vllm():
    params = {"max_tokens": 3, "temperature": 0.5, "top_k": -1, "top_p": 0.9, "seed": 7, "stop": ["END"]}
    asked = read_sample(ask(params=params, num_samples=2, prompt_logprobs=True), LIMITS)
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (3, 0.5, 0, 0.9)
    assert (sampling.stop, asked.extra, asked.seed) == (["END"], {}, 7)
    assert (asked.num_samples, asked.prompt_logprobs) == (2, True)


@pytest.mark.parametrize(
    ("stop", "texts", "extra"),
    [
        (None, [], {}),
        ("END", ["END"], {}),
        ([3, 4], [], {"stop_token_ids": [3, 4]}),
        ([], [], {"ignore_eos": True}),
    ],
)
def test_what_ends_an_answer(stop, texts, extra):
    asked = read_sample(ask(params={"stop": stop}), LIMITS)
    assert (asked.sampling.stop, asked.extra) == (texts, extra)


def test_an_answer_without_a_limit_fills_the_context():
    assert read_sample(ask(), LIMITS).sampling.max_tokens == 4
    assert read_sample(ask(params={"max_tokens": 100}), LIMITS).sampling.max_tokens == 4


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(topk_prompt_logprobs=21), "topk_prompt_logprobs: must be at most 20, got 21"),
        (ask(topk_sample_logprobs=2), "topk_sample_logprobs is not supported"),
        (ask(prompt_alt_tokens_k=2), "prompt_alt_tokens_k is not supported"),
        (ask(record_stability_info=True), "stable_reinforce, which is not supported"),
        (ask([1] * 8), "has 8 tokens; from 1 to 7 are possible"),
        (ask([]), "has 0 tokens"),
        (ask([100]), "the model has the tokens 0 to 99"),
        (ask(prompt_logprobs_last_n=4), "prompt_logprobs_last_n: must be less than the prompt's 4 tokens, got 4"),
        (ask(num_samples=0), "num_samples: must be from 1 to 1024, got 0"),
        (
            ask(params={"max_tokens": 0}),
            "sampling_params.max_tokens: Input should be greater than or equal to 1, got 0",
        ),
        (ask(params={"temperature": -1}), "sampling_params.temperature: Input should be greater than or equal to 0"),
    ],
)
def test_what_cannot_be_sampled_is_refused(request_, message):
    with pytest.raises(RefusedError) as caught:
        read_sample(request_, LIMITS)
    assert message in str(caught.value)


def test_the_sdk_reads_samples_and_the_log_probs_of_the_prompt():
    completions = [
        Completion([7, 8], [-0.5, -0.25], [0, 0], "", truncated=False),
        Completion([9], [-1.0], [0], "", truncated=True),
    ]
    scores, asked = np.array([-1.0, -2.0, -3.0]), read_sample(ask(prompt_logprobs=True), LIMITS)
    response = deserialize_sample_response(write_sample(completions, scores, asked))
    assert [(each.tokens, each.logprobs, each.stop_reason) for each in response.sequences] == [
        ([7, 8], [-0.5, -0.25], "stop"),
        ([9], [-1.0], "length"),
    ]
    assert response.prompt_logprobs == [None, -1.0, -2.0, -3.0]
    last = deserialize_sample_response(write_sample(completions, scores, replace(asked, last_n=2)))
    assert last.prompt_logprobs == [None, None, -2.0, -3.0]
    assert deserialize_sample_response(write_sample(completions, None, asked)).prompt_logprobs is None


def test_the_sdk_reads_the_likeliest_tokens_of_each_position_of_the_prompt():
    asked = read_sample(ask(topk_prompt_logprobs=2), LIMITS)
    told = np.array([(-n, [(n, -0.5), (9, -n)]) for n in (1, 2, 3)], told_dtype(2))
    response = deserialize_sample_response(write_sample([], told, asked))
    assert response.prompt_logprobs is None
    assert response.topk_prompt_logprobs == [None, *([(n, -0.5), (9, -float(n))] for n in (1, 2, 3))]
    both = replace(asked, prompt_logprobs=True, last_n=1)
    response = deserialize_sample_response(write_sample([], told, both))
    assert response.prompt_logprobs == [None, None, None, -3.0]
    assert response.topk_prompt_logprobs == [None, None, None, [(3, -0.5), (9, -3.0)]]


def test_a_request_of_another_form_names_its_field():
    with pytest.raises(RefusedError, match="session_id: Field required"):
        parse(types.SessionHeartbeatRequest, {})
