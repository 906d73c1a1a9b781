"""Tinker's SDK from PyPI, unchanged, with a service on real ranks and a real rollout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.integration.training_service.conftest import NAME, RunningService
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.filterwarnings("ignore")]

NUM_SLOTS = 8
SENTENCE = list(b"The train leaves at nine.")
ADAM = types.AdamParams(learning_rate=5e-3)


@pytest.fixture
def connect(service: RunningService) -> Iterator[Callable[[str], tinker.ServiceClient]]:
    """Returns a client by its name, which is closed after the test."""
    clients = []

    def connect(name: str = "ann") -> tinker.ServiceClient:
        clients.append(tinker.ServiceClient(base_url=service.url, api_key=service.keys[name]))
        return clients[-1]

    yield connect
    for client in clients:
        client.close("success").result()


def sentence(tokens: list[int] = SENTENCE) -> types.Datum:
    inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def learn(training: Any, steps: int, tokens: list[int] = SENTENCE) -> list[float]:
    """Return the loss of each step."""
    losses = []
    for _ in range(steps):
        forward, step = training.forward_backward([sentence(tokens)], "cross_entropy"), training.optim_step(ADAM)
        losses.append(forward.result().metrics["loss:sum"])
        step.result()
    return losses


def test_a_client_learns_a_sentence_samples_it_and_goes_on_from_what_it_saved(service, connect):
    client = connect()
    assert [each.model_name for each in client.get_server_capabilities().supported_models] == [NAME]
    training = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    info = training.get_info()
    assert (info.lora_rank, info.model_data.tokenizer_id) == (4, str(service.model))
    losses = learn(training, 60)
    assert losses[0] > 50
    assert losses[-1] < 0.5, losses

    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(SENTENCE[:3])
    params = types.SamplingParams(max_tokens=len(SENTENCE) - 3, temperature=0.0)
    answer = sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result()
    assert [each.tokens for each in answer.sequences] == [SENTENCE[3:]] * 2
    assert {each.stop_reason for each in answer.sequences} == {"length"}
    stop = types.SamplingParams(max_tokens=50, temperature=0.0, stop=[SENTENCE[7]])
    [stopped] = sampler.sample(prompt, 1, stop).result().sequences
    assert (stopped.tokens, stopped.stop_reason) == (SENTENCE[3:8], "stop")

    scored = training.forward([sentence()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    served = sampler.compute_logprobs(types.ModelInput.from_ints(SENTENCE)).result()
    assert served[0] is None
    assert served[1:] == pytest.approx(scored, abs=0.02), "the rollout serves another adapter than was trained"
    texts = [types.ModelInput.from_ints(SENTENCE[:length]) for length in (25, 9, 17, 3)]
    together = [sampler.compute_logprobs(text) for text in texts]  # beside answers that are sampled
    sampler.sample(prompt, 4, params).result()
    for each in together:
        found = each.result()
        assert found[1:] == pytest.approx(scored[: len(found) - 1], abs=0.02)
    asked = sampler.sample(prompt, 1, params, topk_prompt_logprobs=3).result().topk_prompt_logprobs
    assert asked is not None
    assert asked[0] is None
    for token, top in zip(SENTENCE[1:3], asked[1:], strict=True):  # it has learned the sentence
        assert len(top) == 3
        assert top[0] == (token, pytest.approx(served[SENTENCE.index(token)], abs=0.02))
        assert [logprob for _, logprob in top] == sorted((logprob for _, logprob in top), reverse=True)
    base = client.create_sampling_client(base_model=NAME).result()
    assert sum(base.compute_logprobs(types.ModelInput.from_ints(SENTENCE)).result()[1:]) < -50
    assert sampler.compute_logprobs(types.ModelInput.from_ints(SENTENCE)).result() == served, "the way back"

    saved = training.save_state("learned").result().path
    weights = training.save_weights_for_sampler("learned").result().path
    tensors = load_file(service.checkpoint("ann", weights) / "adapter_model.safetensors")
    assert all(bool(tensor.any()) for tensor in tensors.values()), "an adapter was not trained"
    assert {tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name} == {4}
    other = client.create_training_client_from_state_with_optimizer(saved).result()
    again = other.forward([sentence()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    assert again == scored
    assert re.search(rf"model {re.escape(training.model_id)}: update 60,", service.head_log), "60 steps, 60 updates"
    assert training.forward([sentence()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist() == scored
    by_path = client.create_sampling_client(model_path=weights).result()
    assert by_path.compute_logprobs(types.ModelInput.from_ints(SENTENCE)).result() == served


def test_a_custom_loss_trains_as_the_same_loss_of_the_service(connect):
    def negative_sum(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.stack([each.sum() for each in logprobs]).sum(), {}

    found = []
    for is_custom in (False, True):
        training = connect().create_lora_training_client(base_model=NAME, rank=8, seed=3).result()
        for _ in range(2):
            if is_custom:
                result = training.forward_backward_custom([sentence()], negative_sum)
            else:
                result = training.forward_backward([sentence()], "cross_entropy")
            step = training.optim_step(ADAM)
            found.append((result.result().metrics["loss:sum"], step.result().metrics["grad_norm"]))
    assert found[2:] == [pytest.approx(each, rel=1e-5) for each in found[:2]]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_a_rewarded_sample_becomes_likelier(loss, connect):
    training = connect().create_lora_training_client(base_model=NAME, rank=4, seed=2).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = list(b"answer\n")
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=1)
    sequences = sampler.sample(types.ModelInput.from_ints(prompt), 4, params).result().sequences
    data, padding = [], len(prompt) - 1
    for number, each in enumerate(sequences):
        advantage = 1.0 if number == 0 else -0.2
        inputs: dict[str, Any] = {
            "target_tokens": [0] * padding + each.tokens,
            "logprobs": [0.0] * padding + each.logprobs,
            "advantages": [0.0] * padding + [advantage] * len(each.tokens),
        }
        tokens = types.ModelInput.from_ints(prompt + each.tokens[:-1])
        data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
    first = training.forward_backward(data, loss)
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    before = first.result().loss_fn_outputs[0]["logprobs"].tolist()[padding:]
    assert before == pytest.approx(sequences[0].logprobs, abs=0.02), "trainer and rollout disagree"
    after = training.forward(data, loss).result().loss_fn_outputs[0]["logprobs"].tolist()[padding:]
    assert sum(after) > sum(before)


def test_clients_train_and_sample_side_by_side_as_if_they_were_alone(connect):
    alone = learn(connect("ann").create_lora_training_client(base_model=NAME, rank=4, seed=5).result(), 8)
    clients = [connect(name) for name in ("ann", "bob", "bob", "ann")]
    trainings = [client.create_lora_training_client(base_model=NAME, rank=4, seed=5).result() for client in clients]

    def run(training: Any) -> tuple[list[float], list[float]]:
        losses = learn(training, 8)
        sampler = training.save_weights_and_get_sampling_client().result()
        return losses, sampler.compute_logprobs(types.ModelInput.from_ints(SENTENCE)).result()[1:]

    with ThreadPoolExecutor(len(trainings)) as pool:
        found = list(pool.map(run, trainings))
    for losses, served in found:
        assert losses == pytest.approx(alone, rel=1e-5)
        assert served == pytest.approx(found[0][1], abs=0.02)
    assert sum(found[0][1]) > -alone[0], "the rollouts serve the base model"


def test_samples_of_more_adapters_than_rollouts_hold_are_of_their_own_adapter(connect):
    texts = [list(f"{number} trains leave at {number + 3}.".encode()) for number in range(NUM_SLOTS + 2)]

    def run(tokens: list[int]) -> None:
        training = connect("ann").create_lora_training_client(base_model=NAME, rank=4, seed=5).result()
        prompt, params = types.ModelInput.from_ints(tokens[:4]), types.SamplingParams(max_tokens=4, temperature=0)
        for steps in (20, 20):
            learn(training, steps, tokens)
            sampler = training.save_weights_and_get_sampling_client().result()
            expected = training.forward([sentence(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
            scored = [sampler.compute_logprobs(types.ModelInput.from_ints(tokens)) for _ in range(3)]
            for each in scored:
                assert each.result()[1:] == pytest.approx(expected.data, abs=0.05)
        assert sampler.sample(prompt, 1, params).result().sequences[0].tokens == tokens[4:8]

    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(run, texts))


def test_a_client_reaches_nothing_of_another(service, connect):
    training = connect("ann").create_lora_training_client(base_model=NAME, rank=4).result()
    path = training.save_state("mine").result().path
    with pytest.raises(tinker.NotFoundError, match="does not exist, or is another client's"):
        connect("bob").create_training_client_from_state(path).result()
    with pytest.raises(tinker.AuthenticationError, match="the key is not known here"):
        tinker.ServiceClient(base_url=service.url, api_key="tml-other").get_server_capabilities()


def test_what_is_not_supported_is_refused_with_a_sentence(connect):
    client = connect()
    training = client.create_lora_training_client(base_model=NAME, rank=4).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
    rest = client.create_rest_client()
    datum, attempts = sentence(), list[tuple[Callable[[], Any], str]]()
    for loss in ("gspo", "stable_reinforce"):
        attempts.append((lambda loss=loss: training.forward_backward([datum], loss), f"{loss} is not supported"))
    attempts += [
        (lambda: training.optim_step(types.DimuonParams(learning_rate=1.0)), "dimuon is not supported"),
        (lambda: training.save_weights_external("x"), "save_weights_external is not supported"),
        (lambda: training.load_state("tinker://x/weights/y"), "does not exist, or is another client's"),
        (lambda: training.save_state("../x"), "name: must be letters"),
        (lambda: training.save_weights_and_get_sampling_client(kind="inflight"), "inflight is not supported"),
        (lambda: sampler.sample(prompt, 1, params, topk_prompt_logprobs=21), "topk_prompt_logprobs: must be at most"),
        (lambda: sampler.sample(prompt, 1, params, topk_sample_logprobs=2), "topk_sample_logprobs is not supported"),
        (lambda: sampler.sample(prompt, 1, types.SamplingParams(temperature=-1)), "sampling_params.temperature"),
        (lambda: client.create_lora_training_client(base_model="other"), "other is not served here"),
        (lambda: client.create_lora_training_client(base_model=NAME, rank=33), "rank: must be from 1 to 32, got 33"),
        (lambda: client.create_lora_training_client(base_model=NAME, rank=4, train_mlp=False), "train_mlp"),
        (lambda: rest.list_training_runs(), "training_runs is not supported"),
        (lambda: rest.list_sessions(), "sessions is not supported"),
        (lambda: rest.list_user_checkpoints(), "checkpoints is not supported"),
    ]
    for attempt, message in attempts:
        with pytest.raises(Exception, match=re.escape(message)) as caught:
            attempt().result(timeout=60)
        assert "Traceback" not in str(caught.value)
    assert training.forward([datum], "cross_entropy").result(), "the client cannot go on after a refusal"


def test_a_head_that_dies_is_replaced_with_the_same_keys_and_models(service, connect):
    training = connect().create_lora_training_client(base_model=NAME, rank=4, seed=2).result()
    learn(training, 2)
    before = training.forward([sentence()], "cross_entropy").result().metrics["loss:sum"]
    starts, keys = service.text.count("# bob"), set(re.findall(r"TINKER_API_KEY=\S+", service.text))
    service.kill_head()
    wait_for(lambda: service.text.count("# bob") > starts, "another head")
    assert set(re.findall(r"TINKER_API_KEY=\S+", service.text)) == keys
    assert training.forward([sentence()], "cross_entropy").result().metrics["loss:sum"] == before
