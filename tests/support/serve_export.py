"""Program of test_exports_real: `python -m tests.support.serve_export MODEL [ADAPTER]` generates with vLLM.

Prints one line of JSON: the greedy tokens after PROMPT, and their log-probs.
"""

from __future__ import annotations

import json
import os
import sys

PROMPT = [11, 50, 37, 112, 99, 3]
NUM_TOKENS = 24


def main() -> None:
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: one import of vLLM
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    model, adapter = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        gpu_memory_utilization=0.1,
        enable_lora=adapter is not None,
    )
    request = LoRARequest("adapter", 1, adapter) if adapter else None
    parameters = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True)
    [output] = llm.generate({"prompt_token_ids": PROMPT}, parameters, lora_request=request, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    logprobs = [each[token].logprob for token, each in zip(tokens, output.outputs[0].logprobs, strict=True)]
    print(json.dumps({"tokens": tokens, "logprobs": logprobs}))


if __name__ == "__main__":
    main()
