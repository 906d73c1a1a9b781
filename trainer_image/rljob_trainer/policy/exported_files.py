"""The files of an export besides its weights: config.json, tokenizer and chat, and what else the source has.

config.json is the source's own, with the type of its weights, as both generations of readers need it: transformers 5
writes `rope_parameters`, `dtype`, and some sizes under new names. transformers 4, older vLLM and converters read
`rope_theta`, `rope_scaling` and `torch_dtype`, and take their defaults where these are missing. Of a multimodal model,
transformers 5 reads `tie_word_embeddings` of the whole, transformers 4 that of its text, and either makes up a head
that it does not find. Invariants: what the source spells in one way is not changed there, but its type, and whether the
head is tied, which the weights say. A server of the export renders prompts as the job did (given
data.chatTemplateArguments, for which a Hugging Face folder has no place), and ends answers at the tokens at which
rollouts ended them. The tokenizer's files are the source's own, since transformers 5 writes some that transformers 4
cannot read.
"""

import copy
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rljob_inputs.models.files import open_model

_FILE: Final = "config.json"
_FULL, _LOCAL = "full_attention", "sliding_attention"
_LONG: Final = "longrope"
_SCALINGS: Final = ("linear", "dynamic", "yarn", "llama3", _LONG)
"""Which transformers 4 has."""


def write_config(folder: Path, loaded: Any, dtype: str, architecture: str, *, is_tied: bool) -> None:
    """Replace config.json in the folder, which is the source's. `loaded`: of transformers, for the same model.
    `is_tied`: whether its head has no weights of its own."""
    source = json.loads((folder / _FILE).read_text(encoding="utf-8-sig"))
    standard = type(loaded).from_pretrained(folder)
    text = standard.get_text_config(decoder=True)
    for config, part in _list_parts(standard, source):
        part |= {"dtype": dtype, "torch_dtype": dtype}
        if config in (standard, text):
            part["tie_word_embeddings"] = is_tied
        for older, name in config.attribute_map.items():
            if name in part:
                part.setdefault(older, part[name])
        if parameters := getattr(config, "rope_parameters", None):
            part["rope_parameters"] = parameters
            for name, value in spell_rope(parameters).items():
                part.setdefault(name, value)
    source["architectures"] = [architecture]
    (folder / _FILE).write_text(json.dumps(source, indent=2, ensure_ascii=False) + "\n")


def _list_parts(config: Any, written: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    yield config, written
    for name in config.sub_configs:
        if isinstance(part := written.get(name), dict):
            yield from _list_parts(getattr(config, name), part)


def spell_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` as transformers 4 spells them. Gemma 3 has some for each type of layer; a share of the
    dimensions for one type has no older spelling, and readers take one that is spelled for all types."""
    full = parameters.get(_FULL, parameters)
    names = ("rope_theta", "partial_rotary_factor") if full is parameters else ("rope_theta",)
    own = {name: full[name] for name in names if name in full}
    scaling = {name: value for name, value in full.items() if name != "rope_theta"}
    kind = scaling.get("rope_type", "default")
    if kind == _LONG:  # Phi-3 takes these three alone
        own["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
        scaling = {"type": kind, **{name: scaling[name] for name in ("short_factor", "long_factor")}}
    if kind in _SCALINGS or (kind == "default" and scaling.keys() - own.keys() - {"rope_type"}):
        own["rope_scaling"] = scaling
    if _LOCAL in parameters:
        own["rope_local_base_freq"] = parameters[_LOCAL]["rope_theta"]
    return own


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json", ".ot")
_PAGES = (".md", ".gitattributes", ".gitignore")
"""Files of a repository; they describe another model."""


def copy_other_files(source: str, revision: str, folder: Path) -> None:
    """Copy them from `source`, a folder, hf://org/name or s3://bucket/path, to `folder`. An export writes its own
    files over them."""
    files = open_model(source, revision)
    for name in files.sizes:
        if "/" not in name and not name.startswith(".") and not name.endswith((*_WEIGHTS, *_PAGES)):
            shutil.copyfile(files.fetch(name), folder / name)


_CONFIG: Final = "tokenizer_config.json"
_OWN: Final = ("tokenizer.json", _CONFIG)


def save_chat(
    folder: Path, tokenizer: Any, generation_config: Any | None, *, chat_template: str | None, stop: Sequence[str]
) -> None:
    """Write the files of the tokenizer that the folder lacks, and generation_config.json. `generation_config`: of
    transformers; None: the model has none. `chat_template`: of the job; None: the tokenizer's. `stop`: what ends
    answers, resolved."""
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    own = {name: (folder / name).read_bytes() for name in _OWN if (folder / name).is_file()}
    tokenizer.save_pretrained(folder)
    for name, content in own.items():
        (folder / name).write_bytes(content)
    config = spell_config(json.loads((folder / _CONFIG).read_text(encoding="utf-8-sig")))
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / _CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if generation_config is not None:
        special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        written = copy.deepcopy(generation_config)
        written.eos_token_id = add_end_ids(written.eos_token_id, stop, special)
        written.save_pretrained(folder)


def spell_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json with what transformers 5 alone reads under the names that both generations have."""
    spelled = dict(config)
    if spelled.get("tokenizer_class") == "TokenizersBackend":
        spelled["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(spelled.get("extra_special_tokens"), list):
        spelled["additional_special_tokens"] = spelled.pop("extra_special_tokens")
    return spelled


def add_end_ids(given: int | list[int] | None, stop: Sequence[str], special: Mapping[str, int]) -> Any:
    """Return eos_token_id with the special tokens of `stop`, and unchanged without any."""
    known = given if isinstance(given, list) else [] if given is None else [given]
    missing = [special[text] for text in dict.fromkeys(stop) if text in special and special[text] not in known]
    return [*known, *missing] if missing else given
