"""The answer to "does this model train?": a table of architectures, and what config.json says.

The table, architectures.json, is made from the locked transformers and vLLM (`make generate`), so that it can be read
where neither is installed. Invariant: `validate`, `plan`, `run`, trainers and rollouts all ask this module.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

TABLE = Path(__file__).with_name("architectures.json")
CpuType = Literal["any", "bfloat16", "none"]
AdapterDevice = Literal["any", "gpu", "none"]


@dataclass(frozen=True)
class Architecture:
    """A class of transformers that predicts the next token."""

    name: str
    """As in `architectures` of config.json: the class of transformers, and the name in vLLM."""
    types: tuple[str, ...]
    """`model_type` of its configurations, the preferred class of each type alone."""
    kinds: tuple[str, ...] = ("dense",)
    """dense; or some of multimodal, hybrid (layers with a state) and mixture (experts)."""
    obstacle: str = ""
    """Why it cannot be trained; empty if it can."""
    adapters: AdapterDevice = "any"
    """Where vLLM can add LoRA adapters. Its layers for experts with adapters need a GPU."""
    on_cpus: CpuType = "any"
    """Data types in which vLLM computes it on CPUs; known for tested architectures."""
    is_tested: bool = False
    """Whether a tiny model of it is held against transformers and vLLM (`make test-models`)."""
    tested_with: tuple[str, ...] = ()
    """What further models of it have: types of rope, windows, caps (limits of attention scores), scales."""

    @property
    def is_multimodal(self) -> bool:
        return "multimodal" in self.kinds

    @property
    def is_hybrid(self) -> bool:
        return "hybrid" in self.kinds


@dataclass(frozen=True)
class Table:
    versions: Mapping[str, str]
    """Versions of the libraries from which the table was made, by name."""
    by_name: Mapping[str, Architecture]
    by_type: Mapping[str, Architecture]

    @property
    def libraries(self) -> str:
        return " and ".join(f"{name} {version}" for name, version in self.versions.items())


_PLAIN_ROPE = ("default", "mrope")
_QUANTIZATIONS = ("quantization_config", "compression_config")


@cache
def read_table() -> Table:
    content = json.loads(TABLE.read_text())
    rows = [_read_row(name, row) for name, row in content["architectures"].items()]
    by_type = {model_type: row for row in rows for model_type in row.types}
    return Table(content["versions"], {row.name: row for row in rows}, by_type)


def _read_row(name: str, row: Mapping[str, Any]) -> Architecture:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Architecture(name, **fields)


def architecture_names(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures") or []
    return [name for name in ([names] if isinstance(names, str) else names) if isinstance(name, str)]


def find_architecture(config: Mapping[str, Any]) -> Architecture | None:
    """Return the row of config.json; None if the table has none. Without a name, the type decides, as in
    transformers."""
    table, names = read_table(), architecture_names(config)
    if names:
        return next((table.by_name[name] for name in names if name in table.by_name), None)
    return table.by_type.get(str(config.get("model_type")))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part about text: multimodal models nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def rope_parameters(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return them as one list: transformers 5 has them by type of layer, earlier releases call them rope_scaling."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return []
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def find_obstacles(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the model cannot be trained."""
    architecture, names = find_architecture(config), architecture_names(config)
    what = ", ".join(names) or f"a model of the type {config.get('model_type')}"
    if config.get("is_encoder_decoder"):
        yield f"is {what}, which has an encoder; use a causal language model"
    elif architecture is None:
        yield (
            f"is {what}, which is not among the language models that {read_table().libraries} both have; "
            "docs/models-and-data.md lists those that train"
        )
    elif architecture.obstacle:
        yield f"is {what}, which cannot be trained: {architecture.obstacle}"
    if method := _find_quantization(config):
        yield f"is quantized ({method}), which cannot be trained; use the model in bfloat16, float16 or float32"


def _find_quantization(config: Mapping[str, Any]) -> str:
    """Return the method, from where vLLM looks for it; empty for a model that is not quantized."""
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        for name in _QUANTIZATIONS:
            if found := part.get(name):
                return str(found.get("quant_method", "unknown method") if isinstance(found, Mapping) else found)
    return ""


def describe_untested(config: Mapping[str, Any]) -> str:
    """Return a remark about an architecture that should train, but that no test covers; empty for others."""
    architecture = find_architecture(config)
    if architecture is None or architecture.obstacle:
        return ""
    untested = sorted(_find_settings(config) - set(architecture.tested_with))
    if architecture.is_tested and not untested:
        return ""
    settings = f" with {', '.join(untested)}" if architecture.is_tested else ""
    return (
        f"is {architecture.name}{settings}, which {read_table().libraries} have, but which RLJob does not test; "
        "trainer and rollouts are compared before the first step"
    )


def _find_settings(config: Mapping[str, Any]) -> set[str]:
    """Return what of config.json models of one class differ in, by the names of `tested_with`."""
    text = text_config(config)
    kinds = {rope.get("rope_type", rope.get("type", "default")) for rope in rope_parameters(text)}
    found = {str(kind) for kind in kinds if kind not in _PLAIN_ROPE}
    return found | ({"caps"} if text.get("attn_logit_softcapping") else set())
