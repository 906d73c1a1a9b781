"""The config.json of an export: the source's own, with the type of its weights, as both generations of readers need it.

transformers 5 writes `rope_parameters`, `dtype`, and some sizes under new names. transformers 4, older vLLM and
converters read `rope_theta`, `rope_scaling` and `torch_dtype`, and take their defaults where these are missing.
Of a multimodal model, transformers 5 reads `tie_word_embeddings` of the whole, transformers 4 that of its text, and
either makes up a head that it does not find. Invariant: what the source spells in one way is not changed there, but its
type, and whether the head is tied, which the weights say.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

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
    """Return `rope_parameters` as transformers 4 spells them. Gemma 3 has some for each type of layer."""
    full = parameters.get(_FULL, parameters)
    own = {name: full[name] for name in ("rope_theta", "partial_rotary_factor") if name in full}
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
