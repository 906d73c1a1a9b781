"""Program of test_engine_shapes_real: `python -m tests.support.engine_program FOLDER` loads models as rollouts do.

Runs the transfer engine on vLLM's models with one tensor-parallel worker and two, without vLLM's server. Writes
the digest of each case after two updates, by worker, and the publisher's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_DIST_IDENT": str(os.getpid()),  # of the shared memory between the workers
}

import torch
import torch.multiprocessing
import transformers
from safetensors.torch import save_file

SHAPE: dict[str, Any] = {
    "vocab_size": 500,  # vLLM pads it to a multiple of 64
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GLM = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "head_dim": 16,
}
DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 48,
}
MAMBA = {
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M-*M",
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # The first creates the group of expert parallelism, too.
    "experts": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "tie_word_embeddings": False}),
    "experts-renamed": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "experts-with-a-bias-in-a-buffer": ("Glm4Moe", GLM),
    "experts-with-a-router-in-fp32": ("Glm4Moe", {**GLM, "dtype": "bfloat16"}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "replicated-kv-heads": ("Llama", {"num_key_value_heads": 1}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qkv-biases": ("Qwen2", {"tie_word_embeddings": True}),
    "qkv-biases-replicated": ("Qwen2", {"num_key_value_heads": 1}),
    "experts-that-are-copied-into": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "states-of-the-delta-rule": ("Qwen3Next", {**EXPERTS, **DELTA_NET, "head_dim": 16}),
    "states-of-mamba": ("NemotronH", {**MAMBA, "head_dim": 16}),
}
MISSING = "missing"
"""The case `tied` without one of its parameters."""
CHECKPOINT = "checkpoint"
"""The case `tied` from its checkpoint (load format auto)."""


def build_models(_: int, folder: Path) -> None:
    """Write each case's checkpoint, and two versions as the trainer publishes them."""
    from rljob_trainer.policy.checkpoint_names import persistent_buffers, to_checkpoint
    from rljob_trainer.policy.policy import has_plain_matrices
    from rljob_trainer.weights.checksum import choose_unit, digest_tensors

    expected = {}
    for case, (kind, settings) in CASES.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SHAPE | settings)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(config.dtype or torch.float32)
        model.save_pretrained(folder / case)
        for version in (1, 2):
            tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
            tensors |= persistent_buffers(model)
            for tensor in tensors.values():
                tensor.uniform_(-1, 1)
            weights = to_checkpoint(model, tensors)
            save_file(weights, folder / f"{case}-{version}.safetensors")
            if case == "tied":
                weights = dict(weights)
                del weights["model.layers.1.input_layernorm.weight"]
                save_file(weights, folder / f"{MISSING}-{version}.safetensors")
                expected[MISSING] = {"unit": "word", "digest": str(digest_tensors(weights.values(), "word"))}
        unit = choose_unit(weights.values(), 2) if has_plain_matrices(model) else "element"
        digest = digest_tensors(tensors.values(), unit)
        expected[case] = {"unit": unit, "digest": str(digest)}
    (folder / "expected.json").write_text(json.dumps(expected))


def run_worker(rank: int, num_workers: int, folder: Path) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment
    from vllm.distributed.parallel_state import initialize_model_parallel

    torch.set_num_threads(1)
    expected, digests = json.loads((folder / "expected.json").read_text()), {}
    for case in (*CASES, MISSING, CHECKPOINT):
        model = case if case in CASES else "tied"
        dtype = CASES[model][1].get("dtype", "float32")
        config = _build_config(folder / model, num_workers, "auto" if case == CHECKPOINT else "dummy", dtype)
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                meeting = f"file://{folder}/meet-{num_workers}"
                init_distributed_environment(num_workers, rank, meeting, rank, "gloo")
                initialize_model_parallel(num_workers)
            unit = expected[case if case in expected else model]["unit"]
            digests[case] = _load(config, folder / (model if case == CHECKPOINT else case), unit)
    (folder / f"digests-{num_workers}-{rank}.json").write_text(json.dumps(digests))


def _build_config(model: Path, num_workers: int, load_format: str, dtype: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model),
        tensor_parallel_size=num_workers,
        distributed_executor_backend="mp" if num_workers > 1 else None,
        load_format=load_format,
        dtype=dtype,
        max_model_len=64,
        enforce_eager=True,
        skip_tokenizer_init=True,
    ).create_engine_config()


def _load(config: Any, published: Path, unit: str) -> str:
    """Return the digests of this worker's part after the second version, and after a sleep and the same again."""
    from vllm.model_executor.model_loader import get_model

    from rljob_trainer.rollout.engine import PublishedWeightTransferEngine, fill
    from rljob_trainer.rollout.sleeping_cpu import drop_weights

    model = get_model(vllm_config=config)
    engine = PublishedWeightTransferEngine(None, config, torch.device("cpu"), model)  # type: ignore[arg-type]
    digests = []
    for version in (1, 2, 2):
        if len(digests) == 2:
            drop_weights(model)
            fill(model)
        engine.start_weight_update()
        engine.update_weights({"path": f"{published}-{version}.safetensors", "digest_unit": unit})
        engine.finish_weight_update()
        digests.append(str(engine.readback.digest()))
    return " ".join(digests[1:])


def main() -> None:
    folder = Path(sys.argv[1])
    # Fork before torch starts a thread: the imports, which take most of the time, run once.
    torch.multiprocessing.start_processes(build_models, (folder,), 1, start_method="fork")
    import vllm.v1.worker.cpu.shm  # noqa: F401 - before the engine, as vLLM's worker does

    import rljob_trainer.rollout.engine  # noqa: F401

    for num_workers in (1, 2):
        torch.multiprocessing.start_processes(run_worker, (num_workers, folder), num_workers, start_method="fork")


if __name__ == "__main__":
    main()
