"""Model folders for tests: a real tokenizer and real headers, with weights of a few bytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 64,
    "vocab_size": 300,
    "dtype": "bfloat16",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_model(
    folder: Path, config: dict[str, Any] | None = None, *, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Write config.json, a byte-level tokenizer, and one file of weights. `config` replaces fields; None removes."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {name: value for name, value in {**CONFIG, **(config or {})}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    write_tokenizer(folder)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    write_weights(folder / "model.safetensors", {"embed": [300, 2], "head": [2]})
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token per byte, and </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_weights(path: Path, shapes: dict[str, list[int]], num_bytes: int | None = None) -> None:
    """Write a safetensors file in bfloat16, cut to `num_bytes`."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes((struct.pack("<Q", len(text)) + text + bytes(end))[:num_bytes])
