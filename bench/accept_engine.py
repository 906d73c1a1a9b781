"""One engine of a rollout, without a head or a trainer: what vLLM does with weights that a trainer would publish.

Starts vLLM with the arguments of a rollout that shares its device, loads versions through the transfer engine, and
samples. After each change the log-probs must be those of the same weights in transformers, and far from those of the
version before: with CUDA graphs, a captured graph that still read the old memory would show. It falls asleep as in a
job, and wakes with another version. Each part prints one JSON line when it has ended, so a part that hangs is the one
after the last line.

    python bench/accept_engine.py --gpu --model mixture --adapter

It needs one GPU, or with no --gpu vLLM's build for CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "examples/shared/rljob.yaml"
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # what every attention kernel of vLLM takes
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {"dense": ("Qwen3", {}), "mixture": ("Qwen3Moe", EXPERTS)}
LORA = {"rank": 8, "alpha": 16, "publish": "adapter"}
NUM_REQUESTS, NUM_TOKENS = 8, 24
WEIGHT_STD, ADAPTER_STD = 0.08, 0.05
"""With these, two versions differ by about 1 in a token's log-prob."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean difference of a log-prob, by the engine's type."""
MIN_RATIO = 5
"""How much further the log-probs are from another version than from the served one."""


class Versions:
    """Random versions as a trainer publishes them, and what transformers computes with them."""

    def __init__(self, folder: Path, kind: str, dtype: torch.dtype, *, adapter: bool) -> None:
        import transformers

        self._folder, self._dtype, self._adapter = folder, dtype, adapter
        name, settings = MODELS[kind]
        self._config = getattr(transformers, f"{name}Config")(**SHAPE | settings, tie_word_embeddings=True)
        self._class = getattr(transformers, f"{name}ForCausalLM")
        self.model = folder / "model"
        self._base = self._build(0)
        self._base.save_pretrained(self.model)
        self._references: dict[int, Any] = {}

    def _build(self, seed: int) -> Any:
        torch.manual_seed(seed)
        network = self._class(self._config).to(self._dtype)
        for name, parameter in network.named_parameters():
            if "norm" in name:
                parameter.data.uniform_(0.5, 1.5)
            else:
                parameter.data.normal_(0, WEIGHT_STD)
        return network.eval()

    def publish(self, version: int) -> tuple[Path, Any]:
        """Return the file of a version and its manifest."""
        from safetensors.torch import save_file

        from rljob_api.wire.weights import WeightManifest
        from rljob_trainer.weights.checksum import digest_tensors

        tensors, counted, reference = self._adapt(version) if self._adapter else self._whole(version)
        self._references[version] = reference.float().to("cuda" if torch.cuda.is_available() else "cpu")
        path = self._folder / f"{version}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        checksum = str(digest_tensors(counted.values(), "element"))
        return path, WeightManifest(
            generation="g", version=version, num_bytes=path.stat().st_size, checksum=checksum, digest_unit="element"
        )

    def _whole(self, version: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        from rljob_trainer.policy.checkpoint_names import to_checkpoint

        network = self._build(version)
        tensors = {name: parameter.detach() for name, parameter in network.named_parameters()}
        return dict(to_checkpoint(network, tensors)), tensors, network

    def _adapt(self, version: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        from rljob_api.manifest.roles import Lora
        from rljob_trainer.policy.lora import Adapters, adapter_name, is_adapter

        network = self._build(0)
        adapters = Adapters(network, Lora(**LORA), base=str(self.model), seed=version)
        torch.manual_seed(version)
        for name, parameter in network.named_parameters():
            if ".lora_B." in name:
                parameter.data.normal_(0, ADAPTER_STD)
        tensors = {adapter_name(name): p.detach() for name, p in network.named_parameters() if is_adapter(name)}
        merged = self._class(self._config).float().eval()
        weights = adapters.merge(((name, p.detach().float()) for name, p in network.named_parameters()), tensors)
        merged.load_state_dict(dict(weights), strict=False)
        published = {name: tensor.to(self._dtype) for name, tensor in adapters.scale(tensors).items()}
        return published, published, merged

    @torch.no_grad()
    def difference(self, version: int, prompt: list[int], tokens: list[int], logprobs: list[float]) -> float:
        """Return the mean difference of the tokens' log-probs from those of a version in transformers."""
        reference = self._references[version]
        ids = torch.tensor([prompt + tokens], device=reference.device)
        scores = reference(input_ids=ids).logits[0].float().log_softmax(-1)
        wanted = [float(scores[len(prompt) - 1 + at, token]) for at, token in enumerate(tokens)]
        return sum(abs(a - b) for a, b in zip(wanted, logprobs, strict=True)) / len(tokens)


class Engine:
    """vLLM's engine as a rollout starts it, and its loader."""

    def __init__(self, versions: Versions, folder: Path, dtype: str, options: argparse.Namespace) -> None:
        from rljob_api.wire import contract
        from rljob_cli.check.jobfile import load
        from rljob_inputs.models.files import read_config
        from rljob_trainer.rollout.server import build_arguments
        from rljob_trainer.rollout.startup import StartupFields, parse_arguments, set_defaults
        from rljob_trainer.rollout.vllm_app import start_engine
        from rljob_trainer.rollout.weight_transfer import AdapterFolder, EngineLoader, choose_level, published_adapter

        number = int(options.gpu)
        fields: Mapping[str, object] = {
            "trainer.gpusPerReplica": number,
            "trainer.dtype": dtype,
            "rollout.gpusPerReplica": number,
            "rollout.kvCacheMemory": "256Mi",
        }
        if number:
            fields = {**fields, "rollout.gpuMemoryUtilization": 0.3}
        if options.adapter:
            fields = {**fields, "trainer.lora": json.dumps(LORA)}
        job = load(JOB, [f"spec.{name}={value}" for name, value in fields.items()]).job
        config = read_config(str(versions.model), None)
        environment = {contract.ENV_MODEL: str(versions.model), contract.ENV_ENGINE: "0"}
        arguments = [*build_arguments(job, environment, config), "--skip-tokenizer-init", *options.engine]
        set_defaults(on_gpu=bool(number))
        starts = StartupFields.of_rollout(on_gpu=bool(number), shares_trainer=True)
        self.engine = start_engine(parse_arguments(arguments, starts))
        lora = published_adapter(job.spec, config)
        self._adapter = AdapterFolder(folder, lora) if lora is not None else None
        self.loader = EngineLoader(self.engine, "recompute", [self._adapter] if self._adapter else [])
        self.level = choose_level(self.engine.vllm_config)
        self._versions = versions

    async def compare(self, served: int, other: int, dtype: str) -> dict[str, float]:
        """Sample from the engine, and hold the log-probs against two versions. Raise AssertionError."""
        pairs = await asyncio.gather(*(self._sample(number) for number in range(NUM_REQUESTS)))
        found, others = (
            sum(self._versions.difference(version, *pair) for pair in pairs) / NUM_REQUESTS
            for version in (served, other)
        )
        assert found <= TOLERANCE[dtype], f"log-probs differ by {found:.2g} from version {served} in transformers"
        assert others >= MIN_RATIO * found, (
            f"{others:.2g} from version {other}, {found:.2g} from {served}: nothing shown"
        )
        return {"logprob_difference": found, "from_other_version": others}

    async def _sample(self, number: int) -> tuple[list[int], list[int], list[float]]:
        from vllm import SamplingParams

        prompt = [(37 * number + 11 * at) % SHAPE["vocab_size"] for at in range(5 + number)]
        parameters = SamplingParams(max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True, seed=number, detokenize=False)
        request = self._adapter.build_request() if self._adapter else None
        answers = self.engine.generate(
            {"prompt_token_ids": prompt}, parameters, request_id=f"{number}-{time.monotonic()}", lora_request=request
        )
        *_, last = [answer async for answer in answers]
        tokens = list(last.outputs[0].token_ids)
        scores = [each[token].logprob for token, each in zip(tokens, last.outputs[0].logprobs, strict=True)]
        return prompt, tokens, scores


async def check(options: argparse.Namespace, folder: Path) -> None:
    dtype = "bfloat16" if options.gpu else "float32"
    begin = time.monotonic()

    def report(part: str, **found: object) -> None:
        nonlocal begin
        now = time.monotonic()
        print(json.dumps({"part": part, "seconds": round(now - begin, 1), **found}), flush=True)
        begin = now

    versions = Versions(folder, options.model, getattr(torch, dtype), adapter=options.adapter)
    engine = Engine(versions, folder, dtype, options)
    try:
        # After the start: on CPUs vLLM forks, and a child lacks the threads that compute a digest.
        published = {version: versions.publish(version) for version in (1, 2)}
        report("start", runner=describe(engine.engine.vllm_config))
        loader = engine.loader
        await loader.warm_up()
        report("first request")
        for version in (1, 2):
            weights = await loader.load(*published[version], lambda _: None)
            found = await engine.compare(version, 3 - version, dtype)
            report(f"version {version}", load_seconds=weights.load_seconds, **found)
        awake = await loader.measure()
        await loader.sleep(engine.level)
        asleep = await loader.measure()
        assert not options.gpu or asleep < awake, f"level {engine.level} freed nothing of {awake} bytes"
        report("sleep", level=engine.level, awake_bytes=awake, asleep_bytes=asleep)
        await loader.wake_weights(engine.level)
        if options.gpu and engine.level == 2:  # on CPUs, layers that were dropped fail
            digests = await engine.engine.collective_rpc("rljob_digest")
            assert published[2][1].checksum not in digests, "the weights of before the sleep are still there"
        report("wake", bytes=await loader.measure())
        await loader.load(*published[1], lambda _: None)
        report("version 1 after the sleep", **await engine.compare(1, 2, dtype))
    finally:
        engine.engine.shutdown()


def describe(config: Any) -> str:
    """Return which of vLLM's paths the engine takes."""
    runner = "V2" if config.use_v2_model_runner else "V1"
    compilation = config.compilation_config
    return f"model runner {runner}, {compilation.mode.name}, {compilation.cudagraph_mode.name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument("--adapter", action="store_true", help="publish adapters; default: whole weights")
    parser.add_argument("--engine", action="append", default=[], metavar="ARGUMENT", help="of vLLM; repeatable")
    options = parser.parse_args()
    torch.set_num_threads(1)  # vLLM forks on CPUs
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory(prefix="rljob-engine-") as folder:
        asyncio.run(check(options, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
