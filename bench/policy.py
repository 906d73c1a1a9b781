"""Updates of the trainer's policy alone, with random weights: tokens/s, share of the peak, memory, time by part.

Needs torch, transformers, safetensors, pydantic and numpy: no Ray, no vLLM, no cluster. Without an installation:

    PYTHONPATH=api:inputs:trainer_image python bench/policy.py --model 1.5b --micro-batch-tokens 16384
    PYTHONPATH=api:inputs:trainer_image torchrun --nproc-per-node 8 bench/policy.py --model 1.5b

On a GPU the peak is the bf16 one of its data sheet; on a CPU it is that of matrix products between the updates, with
the same threads and dtype. Progress is on stderr; the last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, replace
from typing import Any

_DEFAULTS = {
    # rows, prompt tokens, answer tokens, tokens per micro-batch
    "cpu": (4, 32, 96, 512),
    "cuda": (64, 512, 3584, 16384),
}


def main() -> None:
    options = _parse()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    from policy_load.measure import Settings, measure
    from policy_load.rows import Load
    from policy_load.shapes import MODELS

    model = options.model or ("0.5b" if device == "cuda" else "small")
    num_rows, prompt, answer, limit = _DEFAULTS[device]
    load = Load(
        lengths=options.rows,
        num_rows=options.num_rows or num_rows,
        prompt_tokens=options.prompt_tokens or prompt,
        answer_tokens=options.answer_tokens or answer,
        group_size=options.group_size,
        vocabulary=MODELS[model]["vocab_size"],
    )
    trainer: dict[str, Any] = {
        "dtype": options.dtype,
        "microBatchTokens": options.micro_batch_tokens or limit,
    }
    if device == "cuda":
        trainer["gpusPerReplica"] = 1  # with the defaults for GPUs
    if options.gradient_checkpointing:
        trainer["gradientCheckpointing"] = options.gradient_checkpointing
    if options.compile:
        trainer["compile"] = options.compile
    if options.attention:
        trainer["attention"] = options.attention
    peak = options.peak_tflops and options.peak_tflops * 1e12
    settings = Settings(model, load, trainer, device, options.warmup, options.updates, peak)
    result = measure(settings)
    if result is not None:
        print(_summary(result))
        described = {**asdict(replace(settings, peak=result.peak_operations_per_second)), "result": asdict(result)}
        print(json.dumps({"bench": "policy", **described}))


def _summary(result: Any) -> str:
    kind = "of its measured matrix products" if result.is_peak_measured else "of its stated peak"
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in result.seconds.items())
    return (
        f"{result.num_ranks} x {result.device}: {result.tokens_per_second:,.0f} tokens/s "
        f"({result.row_tokens_per_second:,.0f} of rows), {100 * result.share_of_peak:.1f}% {kind} "
        f"({100 * result.share_of_forward_and_backward:.1f}% in forward and backward), "
        f"{result.peak_memory_bytes / 2**30:.2f} GiB, {100 * result.padding:.1f}% padding; {parts}"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", choices=("tiny", "small", "0.5b", "1.5b"), help="default: small on CPUs, 0.5b on a GPU"
    )
    parser.add_argument("--rows", choices=("fixed", "mixed", "groups"), default="fixed", help="lengths of the rows")
    parser.add_argument("--num-rows", type=int, help="rows of an update, on all ranks")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--answer-tokens", type=int, help="of the longest answer")
    parser.add_argument("--group-size", type=int, default=8, help="rows that share a prompt, with --rows groups")
    parser.add_argument("--micro-batch-tokens", type=int)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--gradient-checkpointing", choices=("none", "selective", "full"), help="default: by the plan")
    parser.add_argument("--compile", choices=("always", "never"), help="default: with a GPU")
    parser.add_argument("--attention", help="spec.trainer.attention; default: the manifest's")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--threads", type=int, help="of a CPU rank; default: torch's")
    parser.add_argument("--warmup", type=int, default=1, help="updates before the measured ones")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--peak-tflops", type=float, help="of a GPU that is not known by name")
    return parser.parse_args()


if __name__ == "__main__":
    main()
