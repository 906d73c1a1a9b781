"""Tokenizers of each kind are read as their tokenizer.json is written. Imports transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from rljob_api.errors import UserError
from rljob_trainer.written_tokenizer import TEXTS, load_written_tokenizer, rewritten

CORPUS = [*TEXTS, "the train leaves at 7 and 12 tickets cost 45", *(chr(i) for i in range(32, 127))] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]
QUESTION = "Question: What is 2 + 2?\nAnswer:"
SPLIT = Regex(r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_level(*steps: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, level])
    tokenizer.decoder = decoders.ByteLevel()
    return train(tokenizer, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def metaspace(scheme: str = "first") -> Tokenizer:
    bytes_ = {f"<0x{number:02X}>": number for number in range(256)}
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if scheme == "first" else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return train(tokenizer, trainers.BpeTrainer, special_tokens=[*SPECIAL, *bytes_])


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return train(tokenizer, trainers.UnigramTrainer, unk_token="<unk>")


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return train(tokenizer, trainers.WordPieceTrainer)


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return train(tokenizer, trainers.WordLevelTrainer)


def train(tokenizer: Tokenizer, kind: Any, **options: Any) -> Tokenizer:
    trainer = kind(vocab_size=900, show_progress=False, **{"special_tokens": SPECIAL, **options})
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS: dict[str, tuple[Any, str | None, str]] = {
    "byte-level": (byte_level, "PreTrainedTokenizerFast", "llama"),
    "byte-level of GPT-2": (byte_level, "GPT2TokenizerFast", "gpt2"),
    "byte-level without a class": (byte_level, None, "llama"),
    "tiktoken": (lambda: byte_level(pre_tokenizers.Split(SPLIT, "isolated")), "PreTrainedTokenizerFast", "llama"),
    "tiktoken of Qwen 2": (lambda: byte_level(pre_tokenizers.Split(SPLIT, "isolated")), "Qwen2TokenizerFast", "qwen2"),
    "metaspace": (metaspace, "LlamaTokenizerFast", "llama"),
    "metaspace without a prefix": (lambda: metaspace("never"), "PreTrainedTokenizerFast", "mistral"),
    "unigram": (unigram, "PreTrainedTokenizerFast", "llama"),
    "word piece": (word_piece, "PreTrainedTokenizerFast", "llama"),
    "word level": (word_level, "PreTrainedTokenizerFast", "llama"),
    # What transformers rebuilds otherwise.
    "byte-level, called Llama's": (byte_level, "LlamaTokenizerFast", "llama"),
    "tiktoken, called Llama's": (
        lambda: byte_level(pre_tokenizers.Split(SPLIT, "isolated")), "LlamaTokenizer", "deepseek_v3",
    ),
    "other digits than Qwen 2's": (
        lambda: byte_level(pre_tokenizers.Digits(individual_digits=False)), "Qwen2Tokenizer", "qwen2",
    ),
}  # fmt: skip


def write(folder: Path, tokenizer: Tokenizer, kind: str | None, model_type: str) -> str:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": kind}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return str(folder)


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_tokenizer_json_in_the_trainer_and_where_vllm_reads(tmp_path, name):
    build, kind, model_type = KINDS[name]
    written = build()
    source = write(tmp_path, written, kind, model_type)
    expected = written.encode(QUESTION, add_special_tokens=False).ids
    ours = load_written_tokenizer(source, revision=None, trust_remote_code=False)
    assert ours([QUESTION], add_special_tokens=False)["input_ids"] == [expected]
    with rewritten(source, {"revision": None}) as folder:
        theirs = AutoTokenizer.from_pretrained(folder or source)
    assert theirs([QUESTION], add_special_tokens=False)["input_ids"] == [expected]
    assert theirs.decode(expected) == ours.decode(expected)
    assert (theirs.eos_token, theirs.bos_token) == (ours.eos_token, ours.bos_token)


def test_transformers_loses_spaces_of_a_tokenizer_that_is_called_llamas(tmp_path):
    source = write(tmp_path, byte_level(), "LlamaTokenizerFast", "llama")
    rebuilt = AutoTokenizer.from_pretrained(source)
    assert rebuilt.decode(rebuilt([QUESTION])["input_ids"][0]) != QUESTION, "remove written_tokenizer"
    with rewritten(source, {"revision": None}) as folder:
        assert folder is not None
    assert not Path(folder).exists()


def test_a_tokenizer_that_loses_plain_text_is_refused(tmp_path):
    tokenizer = metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", ""), decoders.ByteFallback(), decoders.Fuse()])
    source = write(tmp_path, tokenizer, "PreTrainedTokenizerFast", "llama")
    with pytest.raises(UserError, match="makes 'thetrainleavesat7and12ticketscost45' of 'the train leaves"):
        load_written_tokenizer(source)


def test_a_tokenizer_that_transformers_cannot_read_as_written_is_refused(tmp_path, monkeypatch):
    source = write(tmp_path, byte_level(), "LlamaTokenizerFast", "llama")
    rebuilt = AutoTokenizer.from_pretrained(source)
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.from_pretrained", lambda *args, **options: rebuilt)
    with pytest.raises(UserError, match=r"is not what its tokenizer\.json has: transformers builds .* otherwise"):
        load_written_tokenizer(source)
