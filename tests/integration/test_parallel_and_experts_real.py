"""Real vLLM replicas with tensor parallelism, and with experts: weights, adapters and tokens after two updates.

Everything is fp32, so that Hugging Face's forward is an exact reference. `test_engine_shapes_real` compares the digests
of more shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rljob_api.wire import contract
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.policy.checkpoint_names import persistent_buffers, to_checkpoint
from tests.integration import test_lora_real as lora
from tests.integration import test_rollout_real as real
from tests.support.tiny_qwen3 import TINY_QWEN3
from tests.support.weight_files import publish

pytestmark = [pytest.mark.real, pytest.mark.slow]

PARALLEL = {"extraArgs": ["--tensor-parallel-size", "2"]}


@contextmanager
def run(replica: real.Replica) -> Iterator[real.Replica]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the reference must not compete with the engine for every core
    try:
        yield replica
    finally:
        torch.set_num_threads(num_threads)
        replica.close()


async def check_versions(replica: real.Replica) -> None:
    """Publish each reference, and compare the digest and greedy tokens."""

    async def waits_for_weights() -> bool:
        return "no weights" in (await real._request("GET", contract.UrlPath.READY))[1]

    await real._wait_for(waits_for_weights, replica)
    models: dict[int, Any] = dict(enumerate(replica.references))
    for version in models:
        manifest = replica.publish("g1", version, reference=version)
        served = await real._weights(manifest)
        assert served["version"] == version, served
        assert served["checksum"] == manifest.checksum
        completion = await real._generate(manifest.key, seed=version, max_tokens=24)
        assert completion.versions == [version] * 24
        differences = real._differences(models, real.PROMPT, completion)
        print(f"\nversion {version}: |log-prob difference| mean {differences.mean():.1e}, max {differences.max():.1e}")
        assert differences.max() < 1e-3, "the engine does not compute with the weights that it digests"


async def test_tensor_parallel_replica_serves_what_was_published(tmp_path: Path) -> None:
    with run(real.Replica(tmp_path, rollout=PARALLEL)) as replica:
        await check_versions(replica)
        assert "world_size=2" in replica.log.read_text(), "one worker alone shows nothing"


async def test_tensor_parallel_replica_serves_adapters(tmp_path: Path) -> None:
    replica = lora.AdapterReplica(tmp_path, {"lora": lora.LORA.to_manifest()}, PARALLEL)
    with run(replica):
        replica.start()
        await check_versions(replica)


def build_experts(seed: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        **TINY_QWEN3,
        moe_intermediate_size=48,  # vLLM pads it to a multiple of 32
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    return Qwen3MoeForCausalLM(config).float().eval()


def build_biased_routers(seed: int) -> Glm4MoeForCausalLM:
    """Build a model whose choice of experts depends on a buffer."""
    torch.manual_seed(seed)
    config = Glm4MoeConfig(
        **TINY_QWEN3,
        moe_intermediate_size=48,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        tie_word_embeddings=False,
    )
    model = Glm4MoeForCausalLM(config).float().eval()
    for buffer in persistent_buffers(model).values():
        buffer.uniform_(-0.3, 0.3)
    return model


class ExpertsReplica(real.Replica):
    @staticmethod
    def build(seed: int) -> Qwen3ForCausalLM:
        return build_experts(seed)  # type: ignore[return-value]

    def publish(self, generation: str, version: int, reference: int) -> WeightManifest:
        """As the trainer does: from transformers' parameters, in which the experts of a layer are one."""
        model = self.references[reference]
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        weights = to_checkpoint(model, parameters | persistent_buffers(model))
        manifest = publish(self.store, weights, generation, version)
        self.head.announce(manifest)
        return manifest


@pytest.mark.parametrize("rollout", [{}, PARALLEL])
async def test_experts_compute_with_the_weights_that_were_published(tmp_path: Path, rollout: dict[str, Any]) -> None:
    with run(ExpertsReplica(tmp_path, rollout=rollout)) as replica:
        await check_versions(replica)


class BiasedRoutersReplica(ExpertsReplica):
    @staticmethod
    def build(seed: int) -> Qwen3ForCausalLM:
        return build_biased_routers(seed)  # type: ignore[return-value]


async def test_routers_choose_experts_with_the_bias_that_was_published(tmp_path: Path) -> None:
    with run(BiasedRoutersReplica(tmp_path)) as replica:
        await check_versions(replica)
