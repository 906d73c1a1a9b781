"""What an export has for conversations: the tokenizer, the chat template that was trained with, and end tokens.

Invariants: a server of the export renders prompts as the job did (given data.chatTemplateArguments, for which a Hugging
Face folder has no place), and ends answers at the tokens at which rollouts ended them. The tokenizer's files are the
source's own, since transformers 5 writes some that transformers 4 cannot read.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

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
