"""The part of a model that reads and writes text, which is the part that is trained.

A multimodal model has more: towers for images and sounds, and what connects them. Their weights stay in the source's
files until the export. Invariant: with text alone, the decoder and the head compute what the whole model computes.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from rljob_api.errors import UserError
from rljob_inputs.models.architectures import find_architecture, find_obstacles

_MAX_WRAPPERS = 3


def is_remote(config: Any, options: Mapping[str, Any]) -> bool:
    """Whether the code of the model is in its repository, and may be used."""
    return bool(options.get("trust_remote_code") and getattr(config, "auto_map", None))


def find_class(config: Any) -> Any:
    """Return transformers' class of a model that the table of architectures has. Raise UserError for others."""
    import transformers

    content = describe_config(config)
    if obstacle := next(find_obstacles(content), ""):
        raise UserError(f"the model {obstacle}")
    architecture = find_architecture(content)
    assert architecture is not None
    return getattr(transformers, architecture.name)


def describe_config(config: Any) -> dict[str, Any]:
    """Return what the table of architectures reads of config.json."""
    return {"architectures": config.architectures, "model_type": config.model_type}


def find_decoder(network: Any) -> nn.Module | None:
    """Return the module from token ids to hidden states; None if the network has no such part."""
    decoder = network.get_decoder()
    for _ in range(_MAX_WRAPPERS):
        if not hasattr(decoder, "get_output_embeddings"):
            return None
        if decoder is not network and decoder.get_output_embeddings() is None:
            return decoder
        decoder = getattr(decoder, "model", None)  # Llama 4 returns the decoder with its head
    return None


def require_decoder(network: Any) -> Any:
    decoder = find_decoder(network)
    if decoder is None:
        raise UserError(f"the text model of {type(network).__name__} cannot be used alone")
    return decoder


def keep_text(network: Any) -> None:
    """Remove every module, parameter and buffer of `network` that belongs neither to its decoder nor to its head."""
    kept = [require_decoder(network), network.get_output_embeddings()]

    def visit(module: nn.Module) -> None:
        for name, child in list(module.named_children()):
            if any(child is part for part in kept):
                continue
            if any(part is module for part in kept for module in child.modules()):
                visit(child)
            else:
                delattr(module, name)
        for tensors in (module._parameters, module._buffers):
            tensors.clear()

    visit(network)
