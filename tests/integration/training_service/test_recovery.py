"""What dies in the midst of a client's loop: the client of Tinker's SDK, unchanged, does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.integration.training_service.conftest import NAME, RunningService
from tests.integration.training_service.test_sdk import ADAM, SENTENCE, sentence

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.filterwarnings("ignore")]

STEPS = 8
PROMPT = types.ModelInput.from_ints(SENTENCE[:3])
ANSWER = types.SamplingParams(max_tokens=800, temperature=0.0, stop=[])
Run = tuple[list[float], list[float], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def client(service: RunningService) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=service.url, api_key=service.keys["ann"])
    yield client
    client.close("success").result()


def train(service: RunningService, client: tinker.ServiceClient, disturb: Callable[[], None]) -> Run:
    """Return the loss of each step, the number of its update, and the weights after the last one. `disturb`: called
    while commands of a step are under way. They follow a state that was loaded from a path, where there is another one
    meanwhile."""
    training = client.create_lora_training_client(base_model=NAME, rank=4, seed=7).result()
    losses, updates = list[float](), list[float]()
    for step in range(STEPS):
        forward, update = training.forward_backward([sentence()], "cross_entropy"), training.optim_step(ADAM)
        if step == STEPS // 2:
            disturb()
        losses.append(forward.result().metrics["loss:sum"])
        updates.append(update.result().metrics["num_updates"])
        if step == 0:
            path = training.save_state("early").result().path
            training.load_state_with_optimizer(path).result()
        elif step == 1:
            training.save_state("early", overwrite=True).result()
    path = training.save_weights_for_sampler("last").result().path
    return losses, updates, load_file(service.checkpoint("ann", path) / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(service: RunningService, client: tinker.ServiceClient) -> Run:
    return train(service, client, lambda: None)


@pytest.mark.parametrize("name", ["ray::RankProcess", "rljob_trainer.tinker", "all"])
def test_a_loop_has_the_same_losses_and_weights_whatever_dies(name, service, client, undisturbed):
    sampler = client.create_sampling_client(base_model=NAME).result()
    expected, samples = sampler.sample(PROMPT, 1, ANSWER).result(), list[Future[Any]]()

    def kill() -> None:
        samples.append(sampler.sample(PROMPT, 1, ANSWER))
        if name != "all":
            return service.kill(name)
        service.close()
        service.start()

    losses, updates, weights = train(service, client, kill)
    assert losses == undisturbed[0]
    assert updates == list(range(1, STEPS + 1)), "a command was applied twice, or not at all"
    for key, tensor in undisturbed[2].items():
        assert torch.equal(weights[key], tensor), key
    assert samples[0].result().sequences[0].tokens == expected.sequences[0].tokens


def test_a_sample_arrives_although_its_engine_dies(service, client):
    sampler = client.create_sampling_client(base_model=NAME).result()
    expected = sampler.sample(PROMPT, 1, ANSWER).result()
    waiting = sampler.sample(PROMPT, 1, ANSWER)
    service.kill("VLLM::EngineCore")
    assert waiting.result().sequences[0].tokens == expected.sequences[0].tokens
