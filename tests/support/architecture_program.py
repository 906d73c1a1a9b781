"""Program of test_architectures_real: `python -m tests.support.architecture_program FOLDER ARCHITECTURE...`.

Trains a tiny model of each architecture for one step, loads what is published into vLLM's model, and serves the export,
with adapters, too. Each part runs in a forked process: the imports take most of the time. Writes FOLDER/NAME.json.
"""

from __future__ import annotations

import json
import operator
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.micro_batches import plan_micro_batches

os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_DIST_IDENT": str(os.getpid()),  # of the shared memory between the workers
}

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from rljob_inputs.models.architectures import read_table
from rljob_inputs.models.files import open_model
from rljob_inputs.models.weights import count_parameters, find_weight_problems
from rljob_trainer.driver.model_check import LIMITS, as_row, measure
from rljob_trainer.policy import checkpoints
from rljob_trainer.policy.model_loading import fix_frequencies
from rljob_trainer.policy.policy import Policy
from rljob_trainer.weights.checksum import digest_tensors
from tests.support.export_scenarios import _randomize
from tests.support.policy_scenarios import PLAIN, Scenarios, build_rows, build_tokenizer
from tests.support.tiny_models import MODELS, class_name, write_model

PROMPT = [11, 50, 37, 112, 99, 3]
NUM_TOKENS = 16
MAX_MODEL_LEN = 64
CHECKED = [(7 * i * i + 3 * i + 11) % 250 for i in range(MAX_MODEL_LEN - 1)]
"""What trainer and rollout score, as before the first step of a job."""
LORA = {"rank": 4, "alpha": 6, "publish": "adapter"}


def load_reference(folder: Path) -> Any:
    """Return transformers' own model of the folder, in fp32."""
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    fix_frequencies(model, MAX_MODEL_LEN)
    return model


@torch.no_grad()
def score(model: Any, token_ids: list[int]) -> Tensor:
    """Return the log-probs of all next tokens.  [tokens, vocabulary]"""
    return model(input_ids=torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


class Training(Scenarios):
    """One rank: the policy against transformers, a published version, and exports."""

    def run_one(self, name: str) -> dict[str, Any]:
        model = self.folder / "model"
        write_model(name, model)
        build_tokenizer(model)
        policy, rows = self.policy(PLAIN), build_rows()
        found = {"logprobs": self.compare(policy, model, rows), "attention": policy.config._attn_implementation}
        self.update(policy, rows)
        published = policy.stream_published()
        described, tensors = set(published.described), {key: t.clone() for key, t in published.tensors}
        assert described == tensors.keys(), described ^ tensors.keys()
        save_file(tensors, self.folder / "published.safetensors")
        export = self.folder / "export"
        checkpoints.export_model(policy, export, str(model))
        before, after = read_tensors(model), read_tensors(export)
        return found | {
            "published": str(digest_tensors(tensors.values(), "element")),
            "num_published": len(tensors),
            "num_parameters": sum(tensor.numel() for tensor in tensors.values()),
            "lacking": list(find_weight_problems(open_model(str(model), None))),
            "num_planned": count_parameters(open_model(str(model), None)),
            "num_tensors": len(before),
            "names": sorted(before.keys() ^ after.keys()),
            "kept": [key for key in before.keys() & after.keys() - tensors.keys() if not same(before[key], after[key])],
            "changed": sum(not same(before[key], after[key]) for key in before.keys() & after.keys()),
            "trained": self.score_checked(policy),
            "files": sorted(file.name for file in export.iterdir()),
        }

    def score_checked(self, policy: Policy) -> list[float]:
        """Return the policy's log-probs of the fixed tokens but the first."""
        plan = plan_micro_batches([as_row(CHECKED)], num_ranks=1, micro_batch_tokens=256, layout=policy.layout)[0]
        [facts] = policy.score(plan)
        assert facts.logprobs is not None
        return [float(value) for value in facts.logprobs]

    def compare(self, policy: Policy, model: Path, rows: list[Any]) -> float:
        """Return the largest difference of a log-prob from transformers' whole model, which gets each row alone."""
        expected = load_reference(model)
        plan = plan_micro_batches(rows, num_ranks=1, micro_batch_tokens=256, layout=policy.layout)[0]
        largest = 0.0
        for batch in plan:
            with torch.no_grad():
                logprobs = policy.model(batch, 1.0)[0]
            for number, index in enumerate(batch.row_indices.tolist()):
                if index < 0:
                    continue
                tokens, first = rows[index].token_ids.tolist(), int(rows[index].loss_mask.argmax())
                scores = score(expected, tokens)
                wanted = torch.stack([scores[i - 1, tokens[i]] for i in range(first, len(tokens))])
                ours = logprobs[torch.tensor(batch.rows == number)]
                largest = max(largest, float((ours - wanted).abs().max()))
        return largest

    def adapt(self) -> dict[str, Any]:
        """Train adapters on the export."""
        export = self.folder / "export"
        self.folder = self.folder / "adapters"
        self.folder.mkdir()
        (self.folder / "model").symlink_to(export)
        policy = self.policy(PLAIN, lora=LORA)
        _randomize(policy)
        self.update(policy, build_rows())
        published = dict(policy.stream_published().tensors)
        checkpoints.export_model(policy, self.folder / "export", str(export))
        return {"published_adapter": str(digest_tensors(published.values(), "element"))}


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def train(name: str, folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    training = Training(0, 1, folder)
    found = training.run_one(name)
    return found | training.adapt()


def load(name: str, folder: Path) -> dict[str, Any]:
    """Load what was published into vLLM's model as a rollout does, twice."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment
    from vllm.distributed.parallel_state import initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    from rljob_trainer.rollout.engine import PublishedWeightTransferEngine

    config = EngineArgs(
        model=str(folder / "model"), load_format="dummy", dtype="float32", max_model_len=MAX_MODEL_LEN,
        enforce_eager=True, skip_tokenizer_init=True, language_model_only=is_multimodal(name),
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/meet-engine", 0, "gloo")
        initialize_model_parallel(1)
        model = get_model(vllm_config=config)
        engine = PublishedWeightTransferEngine(None, config, torch.device("cpu"), model)  # type: ignore[arg-type]
        for _ in range(2):
            engine.start_weight_update()
            engine.update_weights({"path": str(folder / "published.safetensors"), "digest_unit": "element"})
            engine.finish_weight_update()
        held = {key.rpartition(".")[0]: str(p.dtype) for key, p in model.named_parameters() if p.dtype != torch.float32}
        return {"held": str(engine.readback.digest()), "other_types": held, "class": type(model).__name__}


def serve(name: str, folder: Path) -> dict[str, Any]:
    """Generate with vLLM from the export, with and without the adapters."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    dtype = "float32" if MODELS[name].on_cpus == "any" else "bfloat16"
    has_adapters = read_table().by_name[class_name(name)].adapters == "any"
    llm = LLM(
        str(folder / "export"), dtype=dtype, max_model_len=MAX_MODEL_LEN, enforce_eager=True,
        kv_cache_memory_bytes=1 << 26, gpu_memory_utilization=0.1, skip_tokenizer_init=True,
        enable_prefix_caching=False, enable_chunked_prefill=False, language_model_only=is_multimodal(name),
        enable_lora=has_adapters,
        **({"worker_extension_cls": "rljob_trainer.rollout.engine.WorkerExtension"} if has_adapters else {}),
    )  # fmt: skip
    parameters = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    prompt: Any = {"prompt_token_ids": PROMPT}
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    [scored] = llm.generate({"prompt_token_ids": CHECKED}, asked, use_tqdm=False)
    entries = zip(scored.prompt_logprobs[1:], CHECKED[1:], strict=True)
    adapter = LoRARequest("adapter", 1, str(folder / "adapters/export/adapter"))
    found: dict[str, Any] = {"scored": [each[token].logprob for each, token in entries], "dtype": dtype}
    for kind, request in {"served": None, "adapted": adapter}.items():
        if request is None or has_adapters:
            [output] = llm.generate(prompt, parameters, lora_request=request, use_tqdm=False)
            tokens = list(output.outputs[0].token_ids)
            logprobs = [each[token].logprob for token, each in zip(tokens, output.outputs[0].logprobs, strict=True)]
            found[kind] = {"tokens": tokens, "logprobs": logprobs}
    return found


def refer(name: str, folder: Path) -> dict[str, Any]:
    """Score what vLLM generated with transformers. In another process: vLLM changes transformers' classes."""
    served = json.loads((folder / "serve.json").read_text())
    trained = json.loads((folder / "train.json").read_text())["trained"]
    found = {"checked": measure([np.array(trained)], [np.array(served["scored"])], 1.0).mean}
    found["checked_limit"] = LIMITS[served["dtype"]]
    for kind, export in (("served", folder / "export"), ("adapted", folder / "adapters/export")):
        if kind not in served:
            continue
        tokens = served[kind]["tokens"]
        scores = score(load_reference(export), PROMPT + tokens)
        wanted = [float(scores[len(PROMPT) - 1 + i, token]) for i, token in enumerate(tokens)]
        found[f"{kind}_difference"] = largest_difference(served[kind]["logprobs"], wanted)
        found[f"{kind}_mean"] = sum(map(abs, map(operator.sub, served[kind]["logprobs"], wanted))) / len(wanted)
        if kind == "adapted":
            scores = score(load_reference(folder / "export"), PROMPT + tokens)
            without = [float(scores[len(PROMPT) - 1 + i, token]) for i, token in enumerate(tokens)]
            found["adapters_effect"] = largest_difference(wanted, without)
    return found


def largest_difference(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def is_multimodal(name: str) -> bool:
    return read_table().by_name[class_name(name)].is_multimodal


PARTS: tuple[Callable[[str, Path], dict[str, Any]], ...] = (train, load, serve, refer)


def run_part(_: int, number: int, name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    part = PARTS[number]
    try:
        found = part(name, folder)
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{part.__name__}: {type(error).__name__}: {error}"}
    (folder / f"{part.__name__}.json").write_text(json.dumps(found))


def main() -> None:
    root, names = Path(sys.argv[1]), sys.argv[2:]
    import peft  # noqa: F401 - before the fork
    import vllm.v1.worker.cpu.shm  # noqa: F401 - before the engine, as vLLM's worker does

    import rljob_trainer.rollout.engine  # noqa: F401

    for name in names:
        folder = root / name
        folder.mkdir()
        found: dict[str, Any] = {}
        for number, part in enumerate(PARTS):
            if part in (serve, refer) and MODELS[name].on_cpus == "none":
                continue
            torch.multiprocessing.start_processes(run_part, (number, name, folder), 1, start_method="fork")
            found |= json.loads((folder / f"{part.__name__}.json").read_text())
            if "error" in found:
                break
        (root / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
