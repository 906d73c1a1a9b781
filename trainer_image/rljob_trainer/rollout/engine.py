"""vLLM's side of a weight update: the transfer engine `rljob-http`, which loads a verified safetensors file in place,
or what the trainer's rank on the worker's device hands over.

Runs in the workers. Owns the load and the read-back of the parameters, and the read-back of an adapter, which vLLM
loads itself. Leaves download, pause and versions to the API process. Invariant: when a load returns, successful or not,
the model has real tensors again.

`InitialWeights` is vLLM's load format `dummy` in a rollout: no checkpoint is read, because the first pull replaces
every parameter. vLLM's own loader for this format takes seconds to draw random numbers on CPUs, and it overwrites
buffers, which no pull replaces. Invariant: what no pull replaces comes from the checkpoint, or changes the digest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, split_kv_b_proj
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader

from rljob_api.wire.contract import ENV_HAND_OVER, ENV_TOKEN
from rljob_api.wire.weights import DigestUnit
from rljob_trainer.rollout.loaders import Loads
from rljob_trainer.rollout.weight_transfer import find_engine_reason
from rljob_trainer.weights.checksum import Digest, digest_tensors
from rljob_trainer.weights.hand_over import receive_tensors
from rljob_trainer.weights.heap import keep_freed_memory, resident_bytes
from rljob_trainer.weights.mapped import MappedFiles

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# Of vllm's hierarchy: vLLM configures no other logger in its workers.
logger = init_logger("vllm.rljob_trainer.rollout.engine")

LOAD_FORMAT = "dummy"
"""vLLM knows the name: for other formats it also asks the checkpoint which tensors it has."""
PLACEHOLDER = 2.0**-10
"""Value of every parameter. Exact in every float type, and not 0, which would add nothing to the digest: a parameter
that the trainer does not publish would not be noticed."""


def _add_nothing(*_: object, **__: object) -> None:
    """No adapter is on the output embedding. vLLM's own function takes the logits of prompts for those of the next
    tokens, and ends the engine if their numbers differ."""


PunicaWrapperCPU.add_lora_logits = _add_nothing  # type: ignore[method-assign]


@register_model_loader(LOAD_FORMAT)
class InitialWeights(BaseModelLoader):
    """Fills the parameters with a placeholder; loads the checkpoint of a model for which the pull is not enough."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: where the checkpoint is needed, its loader downloads it."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        if reason := find_engine_reason(vllm_config, model_config):
            return self._checkpoint(reason).load_model(vllm_config, model_config, prefix)
        return super().load_model(vllm_config, model_config, prefix)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        if buffers := list(find_checkpoint_buffers(model)):
            reason = f"no pull replaces its buffers ({', '.join(buffers[:3])})"
            self._checkpoint(reason).load_weights(model, model_config)
        else:
            fill(model)

    def _checkpoint(self, reason: str) -> DefaultModelLoader:
        logger.info("Loading the checkpoint: %s", reason)
        return DefaultModelLoader(replace(self.load_config, load_format="auto"))


def find_checkpoint_buffers(model: nn.Module) -> Iterator[str]:
    """Yield the names of buffers that a checkpoint may have. vLLM sets those that begin with an underscore itself: the
    scales of quantized keys and values."""
    for prefix, layer in model.named_modules():
        for name, buffer in layer.named_buffers(recurse=False):
            if name not in layer._non_persistent_buffers_set and not name.startswith("_") and buffer.numel():
                yield f"{prefix}.{name}"


@torch.no_grad()
def fill(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.fill_(getattr(parameter, "dummy_weight_value", PLACEHOLDER))


if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

_SHARDED_LAYERS = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, RoutedExperts)
_COPIED = ((RowParallelLinear, "bias"), (RoutedExperts, "e_score_correction_bias"))
"""Parameters of sharded layers that are not sharded."""
_COMPUTED = {("MambaMixer", "A"), ("MambaMixer2", "A")}
"""Parameters that hold a function of the checkpoint's, by their layer: -exp(A_log)."""
_NUM_PROBED_COLUMNS = 4


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One of two sources of a version."""

    path: str = ""
    """A file that every worker of the replica can read, and that does not change before the end of the update."""
    key: str = ""
    """The version that the trainer's rank on each worker's device hands over."""
    digest_unit: DigestUnit = "element"


class PublishedWeightTransferEngine(WeightTransferEngine[WeightTransferInitInfo, UpdateInfo]):
    """Loads complete checkpoints with Hugging Face names; vLLM's layerwise reload fuses, shards and repacks them."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = UpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._loads = Loads(model, is_observed=lambda layer: not isinstance(layer, _SHARDED_LAYERS))
        self.readback = ReadBack(model, self._loads)
        self._files = MappedFiles()
        if device.type == "cpu":
            keep_freed_memory()

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing: the transfer needs no rendezvous."""

    def start_weight_update(self) -> None:
        self.readback.begin()
        with self._on_device():
            self._loads.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Overridden because the base method synchronizes an accelerator, which a CPU replica lacks.
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            # vLLM does not call finish after a failure, and without it the model would stay on the meta device.
            self.finish_weight_update()
            raise

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.readback.unit = update_info.digest_unit
        with self._on_device(), contextlib.closing(self._open(update_info)) as tensors:
            load_weights = cast(Callable[..., object], self.model.load_weights)
            load_weights(self._loads.tensors(tensors))
            for _ in tensors:  # to its end, which a rank waits for
                pass
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _open(self, update_info: UpdateInfo) -> Generator[tuple[str, Tensor]]:
        if not update_info.key:
            return self._files.open(Path(update_info.path)).tensors()
        folder, token = Path(os.environ[ENV_HAND_OVER]), os.environ[ENV_TOKEN]
        return receive_tensors(folder, token, update_info.key, self.device)

    def finish_weight_update(self) -> None:
        try:
            with self._on_device():
                finalize_layerwise_reload(self.model, self.model_config)
                self.readback.pack_tied()
        finally:
            self.readback.end()

    def shutdown(self) -> None:
        """Do nothing: the process ends."""

    def _on_device(self) -> AbstractContextManager[object]:
        # torch.device(...) calls a Python function for each operation, and tensors are on the CPU without it.
        return nullcontext() if self.device.type == "cpu" else torch.device(self.device)


class WorkerExtension:
    """Methods that vLLM adds to each worker (--worker-extension-cls), called by collective_rpc."""

    def rljob_digest(self) -> str:
        """Return the digest of this worker's own parameters. The sum over all workers is the replica's digest."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        assert isinstance(engine, PublishedWeightTransferEngine)
        return str(engine.readback.digest())

    def rljob_adapter_digest(self) -> str:
        """Return the digest of this worker's part of the adapter. The sum over all workers is the replica's digest."""
        return str(digest_adapter(self.model_runner.model))  # type: ignore[attr-defined]

    def rljob_fill(self) -> None:
        """Set all weights to the placeholder, as at the start: what the next load leaves out then changes the digest.
        Memory that was dropped has zeros on CPUs, which would not, and anything on GPUs."""
        fill(self.model_runner.get_model())  # type: ignore[attr-defined]

    def rljob_memory(self) -> int:
        """Return the bytes in use on this worker's GPU, by all processes: what others cannot have. Without a GPU, those
        of its process."""
        if self.device.type == "cpu":  # type: ignore[attr-defined]
            return resident_bytes()
        free, total = torch.accelerator.get_memory_info()
        return int(total - free)


@dataclass
class ReadBack:
    """Digests the parameters in the engine after a load.

    Usually it reads the parameters of the layer. vLLM's CPU kernels remove them: the layer keeps an opaque packed copy
    and an empty parameter. In that case it digests the tensor that is about to be packed. It also reads some columns of
    every packed matrix back through the layer's kernel, to detect a stale copy."""

    model: nn.Module
    loads: Loads
    unit: DigestUnit = "element"
    """Unit of the update's digest."""
    _packed: set[nn.Module] = field(default_factory=set)
    _removed: dict[nn.Module, tuple[Digest, Probe]] = field(default_factory=dict)
    _restore: list[Callable[[], None]] = field(default_factory=list)

    def begin(self) -> None:
        """Observe the packing of every layer until end()."""
        self._packed.clear()
        self._removed.clear()
        for layer in self.model.modules():
            method = getattr(layer, "quant_method", None)
            # Several layers may share one method object.
            if isinstance(method, QuantizeMethodBase) and "process_weights_after_loading" not in vars(method):
                self._observe(method)

    def end(self) -> None:
        while self._restore:
            self._restore.pop()()

    def pack_tied(self) -> None:
        """Pack a tied lm_head again: it is loaded as the embedding, so vLLM does not update its packed copy."""
        for layer in self._packed_layers():
            if layer not in self._packed and cast(Tensor, layer.weight).numel():
                cast(QuantizeMethodBase, layer.quant_method).process_weights_after_loading(layer)

    def digest(self) -> Digest:
        for layer in self._packed_layers():
            probe = self._removed[layer][1] if layer in self._removed else Probe.of(cast(Tensor, layer.weight))
            if not probe.matches(layer):
                raise RuntimeError(f"{type(layer).__name__}: the kernel does not hold the loaded weights")
        owned = [tensor for layer in self.model.modules() for tensor in self._digested(layer)]
        return sum((digest for digest, _ in self._removed.values()), start=digest_tensors(owned, self.unit))

    def _digested(self, layer: nn.Module) -> Iterator[Tensor]:
        """Yield what stands for the layer's own parameters in the digest. Of one that holds a function of what the
        checkpoint has, that is what its loader got, once the parameter was seen to be the function's value."""
        if isinstance(layer, MLAAttention):
            _check_latent(layer)
            return
        for name, parameter in _owned_parameters(layer, self.loads).items():
            given = self.loads.given(layer, name) if (type(layer).__name__, name) in _COMPUTED else None
            if given is None:
                yield parameter
                continue
            expected = torch.empty_like(parameter)
            _get_original_loader(layer.get_parameter(name))(expected, given)
            if not torch.equal(expected, parameter):
                raise RuntimeError(f"{type(layer).__name__}: {name} is not computed from the loaded weights")
            if get_tensor_model_parallel_rank() == 0:
                yield given

    def _packed_layers(self) -> list[nn.Module]:
        return [layer for layer in self.model.modules() if hasattr(layer, "cpu_linear")]

    def _observe(self, method: QuantizeMethodBase) -> None:
        pack = method.process_weights_after_loading

        def process(layer: nn.Module) -> None:
            owned, whole = _owned_parameters(layer, self.loads), dict(layer.named_parameters(recurse=False))
            pack(layer)
            if isinstance(layer, RoutedExperts):
                _pack_experts(layer)
            self._packed.add(layer)
            removed = {name for name in whole if whole[name].numel() and getattr(layer, name).numel() == 0}
            if removed:
                digest = digest_tensors((owned[name] for name in removed & owned.keys()), self.unit)
                self._removed[layer] = digest, Probe.of(whole["weight"].detach())

        method.process_weights_after_loading = process  # type: ignore[method-assign]
        self._restore.append(lambda: vars(method).pop("process_weights_after_loading"))


def _check_latent(layer: MLAAttention) -> None:
    """Verify what latent attention has of another layer's matrix, which that layer digests."""
    parts = (layer.kv_lora_rank, layer.num_heads, layer.qk_nope_head_dim, layer.v_head_dim)
    held = cast(Tensor, layer.W_UK_T), cast(Tensor, layer.W_UV)
    keys, values = split_kv_b_proj(layer.kv_b_proj, held[0].dtype, *parts)
    if not all(map(torch.equal, held, (keys.permute(1, 2, 0), values.transpose(0, 1)))):
        raise RuntimeError("MLAAttention: W_UK_T and W_UV are not those of the loaded kv_b_proj")


def _pack_experts(layer: nn.Module) -> None:
    """Pack the experts for vLLM's CPU kernel. vLLM does it only when it builds the kernel, and later copies the experts
    as they are: the kernel would compute garbage, and the digest, which ignores the order, would not notice."""
    method = layer.quant_method
    if isinstance(method, UnquantizedFusedMoEMethod) and cast(Tensor, layer.w13_weight).device.type == "cpu":
        assert method.moe_kernel is not None
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)


@dataclass(frozen=True)
class Probe:
    """A few columns of a matrix, to verify the copy in an opaque kernel. Adjacent ones, which share cache lines."""

    one_hot: Tensor  # [columns, in]
    expected: Tensor  # [columns, out]

    @classmethod
    def of(cls, weight: Tensor) -> Probe:
        num_columns = min(_NUM_PROBED_COLUMNS, weight.shape[1])
        first = int(torch.randint(weight.shape[1] - num_columns + 1, (), device="cpu"))
        columns = slice(first, first + num_columns)
        one_hot = torch.zeros(num_columns, weight.shape[1], dtype=weight.dtype, device="cpu")
        one_hot[:, columns].fill_diagonal_(1)
        return cls(one_hot, weight[:, columns].T.clone(memory_format=torch.contiguous_format))

    def matches(self, layer: nn.Module) -> bool:
        """Whether the kernel returns the columns for one-hot inputs, which is exact in every float type."""
        kernel = cast(Callable[..., Tensor], layer.cpu_linear)
        return torch.equal(kernel(self.one_hot, layer.weight, None), self.expected)


def _owned_parameters(layer: nn.Module, loads: Loads) -> dict[str, Tensor]:
    """Return the layer's own parameters, or their parts, that only this tensor-parallel rank digests."""
    rank = get_tensor_model_parallel_rank()
    parameters = {name: p.detach() for name, p in layer.named_parameters(recurse=False)}
    is_sharded = isinstance(layer, _SHARDED_LAYERS) and getattr(layer, "tp_size", None) != 1
    if not is_sharded:
        return {name: p for name, p in parameters.items() if rank == 0 or loads.is_shard(layer, name)}
    if rank > 0:  # each rank holds a complete copy
        for kind, name in _COPIED:
            if isinstance(layer, kind):
                parameters.pop(name, None)
    if isinstance(layer, QKVParallelLinear) and rank % layer.num_kv_head_replicas:
        # Another rank digests the same key and value heads.
        num_query_rows = layer.num_heads * layer.head_size
        parameters = {name: p[:num_query_rows] for name, p in parameters.items()}
    return parameters


def digest_adapter(model: nn.Module) -> Digest:
    """Digest what the layers compute with. The slot is padded with zeros, which add nothing."""
    layers = [layer for layer in model.modules() if isinstance(layer, BaseLinearLayerWithLoRA)]
    return digest_tensors(tensor for layer in layers for tensor in _owned_adapter(layer))


def _owned_adapter(layer: BaseLinearLayerWithLoRA) -> list[Tensor]:
    """Return the layer's parts of A and B that only this tensor-parallel rank digests. A row-parallel layer shards A,
    which reads its input; a column-parallel layer shards B, which writes its output."""
    base, rank = layer.base_layer, layer.tp_rank
    a, b = list(layer.lora_a_stacked), list(layer.lora_b_stacked)
    if isinstance(base, RowParallelLinear):
        return a + (b if rank == 0 else [])
    if not isinstance(base, ColumnParallelLinear):
        return a + b if rank == 0 else []
    if isinstance(base, QKVParallelLinear) and rank % base.num_kv_head_replicas:
        b = [b[0][..., : base.num_heads * base.head_size, :]]  # another rank digests the same key and value heads
    return b + (a if rank == 0 else [])
