"""A real vLLM replica that loads adapters (trainer.lora.publish: adapter): it samples as the merged model would.

The adapters are those of the trainer, on one process. Everything is fp32, so that Hugging Face's forward of the merged
weights is an exact reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3ForCausalLM

from rljob_api.manifest.roles import Lora
from rljob_api.wire import contract
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.policy.lora import Adapters, adapter_name, is_adapter
from tests.integration import test_rollout_real as real
from tests.support.weight_files import publish

pytestmark = pytest.mark.real

LORA = Lora(rank=4, alpha=6, publish="adapter")
PROMPT = [5, 77, 1200, 8, 431, 9, 9, 64]


class AdapterReplica(real.Replica):
    """`references` has the merged models: 0 without an adapter, 1 and 2 with one each."""

    def start(self) -> None:
        self.adapters: list[dict[str, torch.Tensor]] = []
        base = self.references[0]
        for seed in range(3):
            network = real._build_model(0)
            adapters = Adapters(network, LORA, base=str(self.folder / "model"), seed=seed)
            torch.manual_seed(seed)
            for name, parameter in network.named_parameters():
                if ".lora_B." in name and seed:
                    parameter.data.normal_(0, 0.05)
            tensors = {adapter_name(n): p.detach() for n, p in network.named_parameters() if is_adapter(n)}
            merged = real._build_model(0)
            weights = dict(adapters.merge(((n, p.detach()) for n, p in network.named_parameters()), tensors))
            merged.load_state_dict(weights, strict=False)
            self.references[seed] = merged.eval()
            self.adapters.append(adapters.scale(tensors))
        assert torch.equal(base.model.embed_tokens.weight, self.references[2].model.embed_tokens.weight)

    def publish(self, generation: str, version: int, reference: int) -> WeightManifest:
        manifest = publish(self.store, self.adapters[reference], generation, version)
        self.head.announce(manifest)
        return manifest


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterReplica]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    replica = AdapterReplica(tmp_path_factory.mktemp("lora"), {"lora": LORA.to_manifest()})
    try:
        replica.start()
        yield replica
    finally:
        torch.set_num_threads(num_threads)
        replica.close()


async def test_log_probs_with_an_adapter_equal_those_of_the_merged_model(replica: AdapterReplica) -> None:
    async def waits_for_weights() -> bool:
        return "no weights" in (await real._request("GET", contract.UrlPath.READY))[1]

    await real._wait_for(waits_for_weights, replica)
    models: dict[int, Qwen3ForCausalLM] = dict(enumerate(replica.references))
    for version in (0, 1, 2):
        manifest = replica.publish("g1", version, reference=version)
        served = await real._weights(manifest)
        assert served["version"] == version
        assert served["checksum"] == manifest.checksum, "the digest read back from the engine is not the publisher's"
        completion = await real._generate(manifest.key, PROMPT, seed=version, max_tokens=32)
        assert completion.versions == [version] * 32
        differences = real._differences(models, PROMPT, completion)
        print(f"\nversion {version}: |log-prob difference| mean {differences.mean():.1e}, max {differences.max():.1e}")
        assert differences.max() < 1e-4
        other = replace(completion, versions=[2 - version if version != 1 else 0] * 32)
        assert real._differences(models, PROMPT, other).mean() > 0.05, "the adapters do not differ: this shows nothing"


async def test_request_in_flight_continues_with_the_new_adapter(replica: AdapterReplica) -> None:
    await real._wait_for(real._is_ready, replica)
    first = replica.publish("g2", 1, reference=1)
    await real._weights(first)
    request = asyncio.create_task(real._generate(first.key, PROMPT, seed=1, max_tokens=300))

    async def is_generating() -> bool:
        _, metrics = await real._request("GET", contract.UrlPath.METRICS)
        return any(
            line.startswith("vllm:num_requests_running") and float(line.split()[-1]) for line in metrics.splitlines()
        )

    await real._wait_for(is_generating, replica, seconds=30)
    served = await real._weights(replica.publish("g2", 2, reference=2))
    assert not request.done(), "the update came after the request; make the request longer"
    print(f"\npause {served['pause_seconds']:.3f} s")
    completion = await request
    assert (len(completion.token_ids), set(completion.versions)) == (300, {1, 2})
    differences = real._differences(dict(enumerate(replica.references)), PROMPT, completion)
    assert differences.mean() < 0.002, "the labels are not those of the adapters that sampled the tokens"
