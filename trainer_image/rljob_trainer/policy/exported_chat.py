"""What an export has for conversations: the tokenizer, the chat template that was trained with, and end tokens.

Invariant: a server of the export renders prompts as the job did (given data.chatTemplateArguments, for which a Hugging
Face folder has no place), and ends answers at the tokens at which rollouts ended them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def save_chat(
    folder: Path, tokenizer: Any, generation_config: Any | None, *, chat_template: str | None, stop: Sequence[str]
) -> None:
    """Write the files of the tokenizer and generation_config.json. `generation_config`: of transformers; None: the
    model has none. `chat_template`: of the job; None: the tokenizer's. `stop`: what ends answers, resolved."""
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    if generation_config is not None:
        special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        written = copy.deepcopy(generation_config)
        written.eos_token_id = add_end_ids(written.eos_token_id, stop, special)
        written.save_pretrained(folder)


def add_end_ids(given: int | list[int] | None, stop: Sequence[str], special: Mapping[str, int]) -> Any:
    """Return eos_token_id with the special tokens of `stop`, and unchanged without any."""
    known = given if isinstance(given, list) else [] if given is None else [given]
    missing = [special[text] for text in dict.fromkeys(stop) if text in special and special[text] not in known]
    return [*known, *missing] if missing else given
