"""What vLLM's loaders of single parameters get during a weight update, and the loaders that its reload leaves out.

vLLM reloads a layer by calling the loaders of its parameters twice: on the meta device to count, then on real tensors.
Owns three repairs of that. Loaders without a name, which it does not accept, get one. Parameters that a model's
load_weights copies into directly, whose values would be lost on the meta device, get a loader. And what loaders are
given is recorded for parameters that hold something else than the checkpoint.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

_COPIES_INTO = {
    "GptOssForCausalLM": {"sinks", "w13_weight", "w13_bias", "w2_weight", "w2_bias"},
    "MiMoV2FlashForCausalLM": {"attention_sink_bias"},
}
"""Parameters that a model's load_weights copies into, by the last part of their name."""
_OVERWRITTEN = "mlp.experts.down_proj_bias"
"""gpt-oss sets it to zero on all tensor-parallel workers but the first, in the tensor that it was given."""


class Loads:
    """The loads of one update."""

    def __init__(self, model: nn.Module, is_observed: Callable[[nn.Module], bool]) -> None:
        """`is_observed`: whether what the loaders of a layer get is recorded."""
        self._model, self._is_observed = model, is_observed
        self._given: dict[tuple[nn.Module, str], Tensor] = {}
        self._shards: set[tuple[nn.Module, str]] = set()

    def begin(self) -> None:
        """Start an update: until its layer is loaded, a parameter is on the meta device."""
        self._given.clear()
        self._shards.clear()
        for parameter in self._model.parameters():
            loader = getattr(parameter, "weight_loader", None)
            if isinstance(loader, functools.partial):
                loader.__name__ = "partial"  # type: ignore[attr-defined]
        initialize_layerwise_reload(self._model)
        copied = _COPIES_INTO.get(type(self._model).__name__, set())
        for layer in self._model.modules():
            for name, parameter in layer.named_parameters(recurse=False):
                if not parameter.is_meta:
                    continue
                if name in copied:
                    self._accept_copies(layer, name, parameter)
                elif self._is_observed(layer):
                    self._observe(layer, name, parameter)

    def tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a file, which is read-only, as load_weights may have them."""
        for name, tensor in tensors:
            yield name, tensor.clone() if name.endswith(_OVERWRITTEN) else tensor

    def given(self, layer: nn.Module, name: str) -> Tensor | None:
        """Return what the loader of a parameter got; None if it was not loaded."""
        return self._given.get((layer, name))

    def is_shard(self, layer: nn.Module, name: str) -> bool:
        """Whether the parameter is a part of what its loader got: other tensor-parallel workers have the rest."""
        return (layer, name) in self._shards

    def _observe(self, layer: nn.Module, name: str, parameter: Any) -> None:
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        if hasattr(loader, "is_observed"):  # vLLM keeps the parameters of the meta device from update to update
            return

        @functools.wraps(loader)
        def observed(param: Tensor, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._given[layer, name] = loaded_weight
            if param.numel() < loaded_weight.numel():
                self._shards.add((layer, name))
            return loader(param, loaded_weight, *args, **kwargs)

        observed.is_observed = True  # type: ignore[attr-defined]
        parameter.weight_loader = observed

    def _accept_copies(self, layer: nn.Module, name: str, parameter: Any) -> None:
        def receive(value: Tensor) -> None:
            info = get_layerwise_info(layer)
            info.loaded_weights.append((name, inspect.signature(default_weight_loader).bind(parameter, value)))
            info.load_numel += value.numel()
            if not isinstance(layer, RoutedExperts):  # which the digest knows to be sharded
                self._shards.add((layer, name))
            if info.load_numel >= (info.load_numel_total or 0):
                _layerwise_process(layer, info)

        if not isinstance(parameter, _Receiving):
            parameter.__class__ = _receiving(cast(Hashable, type(parameter)))
        parameter.receive = receive
        parameter.weight_loader = default_weight_loader


class _Receiving:
    """Part of a parameter's class. On the meta device it hands on what is copied into the parameter."""

    is_meta: bool
    receive: Callable[[Tensor], None]

    @property
    def data(self) -> Any:
        return self

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Any:
        if self.is_meta:
            self.receive(source)
            return self
        return torch.Tensor.copy_(self, source, non_blocking)  # type: ignore[arg-type]


@functools.cache
def _receiving(kind: Any) -> Any:
    return type(f"Receiving{kind.__name__}", (_Receiving, kind), {})
