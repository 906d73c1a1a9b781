"""What a checkpoint lacks, by the names of its tensors and config.json. Pure.

Finds what the names alone show: layers or parts of a layer that are not there, a head that is not tied, names that a
wrapper has changed. Layers differ in ways that only their code knows, so this judges tested architectures alone; the
ranks compare every name with the model's own. Invariant: no complete checkpoint is refused.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rljob_inputs.models.architectures import find_architecture, text_config

_LAYER = re.compile(r"(.+?)\.(\d+)\.(.+)")
_WRAPPED = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^(module|base_model)\.")
"""Names that torch.compile, FSDP, DDP and peft give."""
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.")
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MAX_NAMED = 3


def find_missing(names: Collection[str], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong. `names`: of the text model's tensors."""
    if wrapped := sorted(filter(_WRAPPED.search, names)):
        yield f"has the weight {wrapped[0]}, whose name a wrapper has changed: save the module inside of it"
        return
    architecture, layers = find_architecture(config), _find_layers(names)
    if architecture is None or not architecture.is_tested or not layers:
        return
    # A multimodal model says in two places whether its head is tied.
    is_tied = architecture.is_multimodal or config.get("tie_word_embeddings", architecture.ties_head)
    head = [] if is_tied or any(map(_HEAD.search, names)) else ["lm_head.weight"]
    if missing := sorted({*_find_in_layers(layers, text_config(config)), *head}):
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        yield f"lacks the weights {', '.join(missing[:_MAX_NAMED])}{more}; copy or download the model again"


def _find_layers(names: Collection[str]) -> dict[str, dict[int, set[str]]]:
    """Return the names within each layer, by what is in front of its number."""
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for match in filter(None, map(_LAYER.fullmatch, names)):
        found[match[1]][int(match[2])].add(match[3])
    return found


def _find_in_layers(layers: Mapping[str, Mapping[int, set[str]]], text: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a layer lacks that another one of its kind has besides all that this one has."""
    count = next((text[name] for name in _COUNTS if isinstance(text.get(name), int)), 0)
    stem = max(layers, key=lambda each: sum(map(len, layers[each].values())))
    # Layers that reuse keys and values of others have none.
    kinds = text.get("layer_types") or [None] * count
    num_own = count - (text.get("num_kv_shared_layers") or 0)
    for number in range(count):
        own = layers[stem].get(number, set())
        if not own:
            yield f"{stem}.{number}.*"
            continue
        for other in range(min(count, len(kinds))):
            parts = layers[stem].get(other, set())
            is_alike = kinds[other] == kinds[number] and (other < num_own) == (number < num_own)
            if is_alike and own < parts:
                yield from (f"{stem}.{number}.{part}" for part in parts - own)
