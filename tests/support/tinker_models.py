"""Models for a training service: `python -m tests.support.tinker_models FOLDER` writes one that answers.

Its next token depends on the last one alone: it answers \\boxed{3} or \\boxed{4}, each half of the time, so that a
reward for one of them differs within a group.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

VOCABULARY, HIDDEN, LAYERS = 320, 320, 1
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
_SURE, _TIE = 12.0, 11.3


def write_answering_model(folder: Path) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    ids = write_tokenizer(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        tie_word_embeddings=False,
    )
    network = Qwen3ForCausalLM(config).to(torch.float32)
    scale = HIDDEN**-0.5  # the norm makes a token's state 1 / scale x its unit vector
    with torch.no_grad():
        network.model.embed_tokens.weight.copy_(torch.eye(VOCABULARY))
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        head = torch.randn(VOCABULARY, HIDDEN) * scale
        chain = ["\n", *"\\boxed{"]
        for now, then in zip(chain, [*chain[1:], None], strict=True):
            if then is not None:
                head[ids[_byte(then)], ids[_byte(now)]] = _SURE * scale
        for digit in "34":
            head[ids[digit], ids["{"]] = _TIE * scale
            head[ids["}"], ids[digit]] = _SURE * scale
        head[ids["<|im_end|>"], ids["}"]] = _SURE * scale
        network.lm_head.weight.copy_(head)
    network.save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write one token per byte, and those that mark turns. Return the ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return dict(tokenizer.get_vocab())


def _byte(character: str) -> str:
    """Return the token of an ASCII character: a byte-level vocabulary spells line ends otherwise."""
    return "Ċ" if character == "\n" else character


if __name__ == "__main__":
    write_answering_model(Path(sys.argv[1]))
