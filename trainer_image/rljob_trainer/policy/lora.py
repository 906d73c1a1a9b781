"""LoRA: adds adapters to a network, and turns them into what is published, saved and served.

peft creates and runs the adapters. Owns their names outside of the trainer and the sum with the model's own weights.
Invariant: an adapter is fp32 and has a gradient; every other parameter has the compute dtype and no gradient.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rljob_api.errors import UserError
from rljob_api.manifest.roles import ALL_LINEAR, Lora
from rljob_inputs.hub import repository_name
from rljob_trainer.policy import sharding

_NAME = "default"
_PREFIX = "base_model.model."
"""Prefix of every name in peft's files."""
_FILE = "adapter_model.safetensors"


class MergeCost:
    """How much of the adapters' update is left in merged weights. In bf16, what is less than half the distance between
    two values of a weight rounds to nothing: with W from a checkpoint in bf16, that is most of a small update."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._whole: list[Tensor] = []

    def add(self, update: Tensor, merged: Tensor) -> None:
        """`update`: scale x B A of one module, `merged`: what the merged weights have of the update."""
        self._kept.append((update * merged).sum(dtype=torch.float64))
        self._whole.append(update.square().sum(dtype=torch.float64))

    @property
    def share(self) -> float | None:
        """The projection of what is left on the update, over the update: 1 if nothing is lost; None without an
        update."""
        whole = sum(value.item() for value in self._whole)
        return sum(value.item() for value in self._kept) / whole if whole else None


class Adapters:
    """The adapters of one network, which is sharded after this."""

    def __init__(self, network: nn.Module, settings: Lora, *, base: str, seed: int) -> None:
        """Freeze `network` and add adapters to it: A is random and the same on all ranks, B is zero. `base`: the
        model's source, for peft's files. Raise UserError if a module does not exist."""
        from peft import LoraConfig, inject_adapter_in_model
        from peft.functional import cast_adapter_dtype

        targets = find_targets(network, settings.target_modules)
        self.config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=targets,
            task_type="CAUSAL_LM",
            base_model_name_or_path=repository_name(base),
            inference_mode=False,
        )
        network.requires_grad_(False)
        with torch.random.fork_rng(devices=[]), _stand_ins(network):
            torch.manual_seed(seed)
            inject_adapter_in_model(self.config, network, _NAME)
        cast_adapter_dtype(network, _NAME)  # to fp32: they are created in the network's dtype
        self._scale = settings.alpha / settings.rank
        self._shards: dict[str, DTensor] = {}
        self._layers: list[Any] = [module for module in network.modules() if hasattr(module, "lora_A")]

    def find_shards(self, model: nn.Module, prefix: str) -> None:
        """Find the shards that the optimizer updates, once `model` is sharded and before its first forward: after it,
        modules may hold gathered copies. `prefix`: of the network's names in `model`."""
        self._shards = {
            adapter_name(name.removeprefix(prefix)): cast(DTensor, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def gather(self) -> dict[str, Tensor]:
        """Return the fp32 adapters by peft's names, on every rank's device. A collective."""
        return {name: sharding.gather(shard) for name, shard in self._shards.items()}

    def reset(self, rank: int, alpha: int, seed: int) -> None:
        """Begin a new adapter of `rank`, at most that of the settings: what A and B have beyond it is zero, and so are
        its gradients. A collective."""
        generator = torch.Generator().manual_seed(seed)
        for name, shard in self._shards.items():
            value = torch.zeros(shard.shape)
            if ".lora_A." in name:  # as peft initializes it
                bound = shard.shape[1] ** -0.5
                value[:rank].uniform_(-bound, bound, generator=generator)
            self._write(shard, value)
        self.set_rank(rank, alpha)

    def set_rank(self, rank: int, alpha: int) -> None:
        """Let the adapters have `rank`, of which the scale and the files depend."""
        self._scale = alpha / rank
        self.config.r, self.config.lora_alpha = rank, alpha
        for layer in self._layers:
            layer.scaling[_NAME] = self._scale

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """By peft's names."""
        return {name: shard.shape for name, shard in self._shards.items()}

    @torch.no_grad()
    def _write(self, shard: DTensor, value: Tensor) -> None:
        shard.copy_(distribute_tensor(value.to(shard.device), shard.device_mesh, shard.placements))

    def scale(self, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return adapters of scale 1: B has the factor alpha / rank."""
        return {name: t * self._scale if ".lora_B." in name else t for name, t in adapters.items()}

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the model without its adapters: it is the reference model."""
        # peft's enable_adapters() also changes which parameters need a gradient, which FSDP does not expect.
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False

    def merge(
        self, weights: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], cost: MergeCost | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of a plain model: W + scale x B A, computed in fp32 and rounded once, to W's dtype.

        `weights`: of the network with adapters, by name. `adapters`: fp32, by peft's names. `cost`: gets each sum.
        """
        for name, weight in weights:
            if is_adapter(name):
                continue
            module, is_adapted, leaf = name.rpartition(".base_layer.")
            if is_adapted and leaf == "weight":
                a, b = (adapters[f"{_PREFIX}{module}.lora_{side}.weight"] for side in "AB")
                update, before = self._scale * (b @ a), weight.float()
                weight = (before + update).to(weight.dtype)
                if cost is not None:
                    cost.add(update, weight.float() - before)
            yield f"{module}.{leaf}" if is_adapted else name, weight

    def save(self, adapters: Mapping[str, Tensor], folder: Path) -> None:
        """Write the files that peft and `vllm serve --enable-lora` load."""
        from safetensors.torch import save_file

        folder.mkdir()
        self.config.save_pretrained(str(folder))
        save_file({name: tensor.cpu().contiguous() for name, tensor in adapters.items()}, folder / _FILE)


@contextlib.contextmanager
def _stand_ins(network: nn.Module) -> Iterator[None]:
    """Replace weights on the meta device by one value each: peft creates adapters on the device of the weights."""
    replaced = [m for m in network.modules() if isinstance(m, nn.Linear) and m.weight.is_meta]
    weights = [module.weight for module in replaced]
    for module, weight in zip(replaced, weights, strict=True):
        value = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        module.weight = nn.Parameter(value, requires_grad=False)
    try:
        yield
    finally:
        for module, weight in zip(replaced, weights, strict=True):
            module.weight = weight


def find_targets(network: nn.Module, wanted: list[str]) -> list[str]:
    """Return the names of the modules that get an adapter: the last parts of linear modules, without the head's. Raise
    UserError if one of the `wanted` names does not exist, or cannot have an adapter."""
    head = cast(Any, network).get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in network.named_modules()
        # Not of a subclass with another result, such as the router of Llama 4.
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and module is not head
    }
    existing = sorted(linear - _find_unsupported(network, sorted(linear)))
    missing = [name for name in wanted if name != ALL_LINEAR and name not in existing]
    if missing or not existing:
        raise UserError(
            "spec.trainer.lora.targetModules: the model has no linear module that can have an adapter called "
            f"{', '.join(missing) or 'anything'}; it has {', '.join(existing) or 'none'}"
        )
    return existing if wanted == [ALL_LINEAR] else sorted(set(wanted))


def _find_unsupported(network: Any, names: list[str]) -> set[str]:
    """Return the names that peft refuses, or takes for those of experts, which are one parameter without modules. It
    could not load their adapters."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
    from peft.utils.transformers_weight_conversion import _convert_peft_config_moe

    unsupported = set()
    for name in names:
        config = LoraConfig(target_modules=[name])
        try:
            _check_lora_target_modules_mamba(config, network, name)
            _convert_peft_config_moe(config, network)
        except ValueError:  # it also refuses a part of what the experts have
            unsupported.add(name)
        if name not in (config.target_modules or ()):
            unsupported.add(name)
    return unsupported


def is_adapter(name: str) -> bool:
    """Whether the parameter belongs to an adapter, by its name in the network."""
    return ".lora_A." in name or ".lora_B." in name


def adapter_name(name: str) -> str:
    """Return peft's name of an adapter's parameter, from that in the network."""
    return _PREFIX + name.replace(f".{_NAME}.", ".")
