"""A model's tokenizer as its tokenizer.json is written, for the head, the ranks and vLLM.

transformers rebuilds some tokenizers by the class that tokenizer_config.json names: a byte-level one of the class
LlamaTokenizerFast loses its spaces. Invariant: ids of texts are those of tokenizer.json, by which `rljob validate`
counts, and plain text survives encode and decode.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_trainer.temporary import TemporaryFolder

TEXTS = (
    "The train to the coast leaves at half past seven, and the tickets cost 12 euros for each of the four friends.",
    "def area(width, height):\n    return width * height\n\nprint(area(3, 14))  # 42",
    "A farmer has 17 sheep. All but 9 run away. How many sheep are left? Nine, because all but nine ran away.",
    "Die Bäckerei öffnet um sechs Uhr; wer früh kommt, bekommt warme Brötchen für 0,45 Euro.",
    "Water boils at 100 degrees Celsius at sea level. On a mountain of 3,000 metres it boils at about 90 degrees.",
    '{"name": "Ana", "age": 31, "cities": ["Oslo", "Lima"], "active": true}',
)
_PLAIN = "the train leaves at 7 and 12 tickets cost 45"
"""What tokenizers that normalize leave as it is, too."""


def load_written_tokenizer(name: str, **options: Any) -> Any:
    """Return transformers' tokenizer of a folder or org/name of the Hub. `options`: of from_pretrained. Raise UserError
    if its ids are not those of tokenizer.json, or if it loses plain text."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer, written = AutoTokenizer.from_pretrained(name, **options), _encode_as_written(name, options)
    if written is not None and _encode(tokenizer) != written:
        rebuilt, tokenizer = type(tokenizer).__name__, PreTrainedTokenizerFast.from_pretrained(name, **options)
        if _encode(tokenizer) != written:
            raise UserError(
                f"the tokenizer of {name} is not what its tokenizer.json has: transformers builds {rebuilt} otherwise; "
                "remove settings of tokenizer_config.json that change it"
            )
    (ids,) = tokenizer([_PLAIN], add_special_tokens=False)["input_ids"]
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    unknown = {tokenizer.unk_token, getattr(model, "unk_token", None)}
    if unknown.isdisjoint(tokenizer.convert_ids_to_tokens(ids)) and decoded.strip() != _PLAIN:
        raise UserError(
            f"the tokenizer of {name} ({type(tokenizer).__name__}) makes {decoded!r} of {_PLAIN!r}; set "
            "tokenizer_class in tokenizer_config.json to that of the base model"
        )
    return tokenizer


@contextlib.contextmanager
def rewritten(name: str, options: Mapping[str, Any]) -> Iterator[str | None]:
    """Yield a folder from which AutoTokenizer reads the tokenizer as it is written; None if it does so from `name`."""
    from transformers import AutoTokenizer

    written = _encode_as_written(name, options)
    if written is None or _encode(AutoTokenizer.from_pretrained(name, **options)) == written:
        yield None
        return
    with TemporaryFolder("tokenizer") as folder:
        load_written_tokenizer(name, **options).save_pretrained(folder)
        Path(folder, "config.json").write_text("{}")  # for some types of models, the class is another than it says
        yield str(folder)


def _encode_as_written(name: str, options: Mapping[str, Any]) -> list[list[int]] | None:
    """Return the ids of TEXTS by tokenizer.json; None without it, and for a tokenizer with code of its own."""
    from tokenizers import Tokenizer
    from transformers.models.auto.tokenization_auto import get_tokenizer_config
    from transformers.utils.hub import cached_file

    revision = options.get("revision")
    path = cached_file(name, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    if path is None or (
        options.get("trust_remote_code") and "auto_map" in get_tokenizer_config(name, revision=revision)
    ):
        return None
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [encoding.ids for encoding in tokenizer.encode_batch(list(TEXTS), add_special_tokens=False)]


def _encode(tokenizer: Any) -> Sequence[Sequence[int]]:
    ids: list[list[int]] = tokenizer(list(TEXTS), add_special_tokens=False)["input_ids"]
    return ids
