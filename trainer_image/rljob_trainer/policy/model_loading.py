"""From a model's source to a sharded module that scores tokens: Hugging Face loading, FSDP2 units.

Knows transformers and FSDP2, but not the losses. Invariant: master weights are fp32, and computation uses the compute
dtype. `ScoringModel.forward` is the only way into the network, so that FSDP's hooks see every use of a parameter.

Rotary embeddings whose frequencies depend on the length of a text are fixed for the job, as vLLM fixes them.
transformers chooses them in each forward pass, by the longest row of a micro-batch: a row's log-probs would depend on
its neighbours, and differ from the rollout's.

    longrope   the long factors if rollout.maxModelLen is above original_max_position_embeddings, else the short ones
    dynamic    those of max_position_embeddings; vLLM does not lengthen them, so a longer maxModelLen is refused
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rljob_api.errors import TransientError, UserError
from rljob_inputs.models.config import find_logit_transform
from rljob_inputs.models.files import place_model
from rljob_inputs.objects.errors import CopyError, RefusedObjectError, StorageAwayError
from rljob_trainer.failures.configuration import ErrorFacts, SourceAwayError, is_infrastructure_error, summarize
from rljob_trainer.policy.arrays import integers, to_device
from rljob_trainer.policy.attention import attention_inputs, initial_attention
from rljob_trainer.policy.layout import MicroBatch
from rljob_trainer.policy.selected_logprobs import Head, selected_logprobs
from rljob_trainer.policy.sharded_weights import (
    OtherTensors,
    Skeleton,
    UnreadableError,
    build_network,
    find_files,
    require_weights,
)
from rljob_trainer.policy.shared_memory import use_shared_memory
from rljob_trainer.policy.text_model import find_class, is_remote, keep_text, require_decoder


def fix_frequencies(network: Any, max_model_len: int | None) -> None:
    """Fix the frequencies of `network`, whose buffers are computed. `max_model_len`: None is the engine's default."""
    for module in network.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fix(module, None, kinds, max_model_len)
        elif isinstance(kinds, dict):
            module.rope_type = {each: _fix(module, each, kind, max_model_len) for each, kind in kinds.items()}


def _fix(module: Any, layer_type: str | None, kind: str, max_model_len: int | None) -> str:
    """Return the type with which transformers leaves the frequencies as they are."""
    config = module.config
    if kind == "longrope":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        # As vLLM: without a limit, longer texts are refused, for the sake of short ones.
        length = max_model_len or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length, layer_type=layer_type)
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        module.register_buffer(name, frequencies, persistent=False)
        return "default"
    if "dynamic" not in kind:
        return kind
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    limit = config.max_position_embeddings
    if max_model_len is not None and max_model_len > limit and not parameters.get("alpha"):
        raise UserError(
            f"its rope is of the type dynamic, which vLLM does not lengthen beyond {limit} tokens "
            f"(max_position_embeddings); set spec.rollout.maxModelLen to {limit} or less, got {max_model_len}"
        )
    return "default"


log = logging.getLogger(__name__)


class ScoringModel(nn.Module):
    def __init__(self, network: Any, dtype: torch.dtype, head: Head | None = None) -> None:
        super().__init__()
        self.network = network
        self.dtype, self._head = dtype, head or Head()
        self._transform = find_logit_transform(network.config.get_text_config().to_dict())

    def forward(
        self, batch: MicroBatch, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # [targets], [targets], [targets, teachers, k]
        """Return the log-prob of each target, the entropy, and the log-probs of what teachers find likeliest there."""
        head = self.network.get_output_embeddings()
        device = head.weight.device
        chosen = source_states(require_decoder(self.network), batch, device, self.dtype)
        targets, temperatures = integers(batch.targets, device), batch.temperatures
        differ = temperatures.max() > temperatures.min()
        temperature = to_device(temperatures, device, torch.float32) if differ else float(temperatures[0])
        if batch.top is not None:
            targets = torch.cat([targets[:, None], integers(batch.top["token"], device).flatten(1)], 1)
        logprobs, entropy = selected_logprobs(
            chosen, head.weight, targets, temperature, entropy_gradient, self._transform, self._head
        )
        if batch.top is None:
            return logprobs, entropy, None
        return logprobs[:, 0], entropy, logprobs[:, 1:].view(batch.top.shape)


def source_states(decoder: Any, batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the hidden states that predict the targets.  [targets, hidden]"""
    hidden = decoder(
        input_ids=integers(batch.token_ids, device),
        use_cache=False,
        **attention_inputs(decoder.config, batch, dtype=dtype, device=device),
    ).last_hidden_state  # [lines, length, hidden]
    return hidden.flatten(0, 1)[integers(batch.sources, device)]


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights are read after it is sharded."""

    network: Any
    """The text model, on the meta device unless every rank had to load it whole."""
    fill: Callable[[torch.device], None]
    """Reads this rank's weights into the sharded network. Raises UserError if that fails."""
    other_tensors: OtherTensors = field(default_factory=OtherTensors)
    """What else its files have, which an export keeps."""


def open_network(
    source: str, *, dtype: torch.dtype, attention: str, options: dict[str, Any], max_model_len: int | None = None
) -> OpenedModel:
    """Open the language model at `source`, a folder, hf://org/name or s3://bucket/path, without what reads no text.
    `attention`: as spec.trainer.attention. `max_model_len`: as spec.rollout.maxModelLen. Raise UserError if that fails,
    and if its files lack a weight: every weight comes from them. What is computed: buffers that no checkpoint has, such
    as frequencies of rotary embeddings."""
    with _user_errors(source):
        try:
            skeleton = _open_skeleton(source, dtype=dtype, attention=attention, options=options)
        except UnreadableError as reason:
            log.warning("%s: every rank loads the whole model into host memory, because %s", source, reason)
            network = _load_whole(source, dtype=dtype, attention=attention, options=options)
            opened = OpenedModel(network, lambda device: None)
        else:
            opened = OpenedModel(skeleton.network, partial(_fill, skeleton, source), skeleton.other_tensors)
        fix_frequencies(opened.network, max_model_len)
    if getattr(opened.network.get_output_embeddings(), "bias", None) is not None:
        raise UserError(
            f"spec.model.source: the head of {source} adds a bias to the logits, which the trainer does not support; "
            "use a model with a plain head"
        )
    return opened


def _open_skeleton(source: str, *, dtype: torch.dtype, attention: str, options: dict[str, Any]) -> Skeleton:
    from transformers import AutoConfig

    repository = place_model(source, report=log.info)
    config = AutoConfig.from_pretrained(repository, **options)
    network = build_network(config, repository, dtype=dtype, attention=attention, options=options)
    return Skeleton(network, find_files(repository, options), dtype)


def _load_whole(source: str, *, dtype: torch.dtype, attention: str, options: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    repository = place_model(source, report=log.info)
    config = AutoConfig.from_pretrained(repository, **options)
    kind = AutoModelForCausalLM if is_remote(config, options) else find_class(config)
    chosen = initial_attention(kind, config, attention)
    network, found = kind.from_pretrained(
        repository, dtype=dtype, attn_implementation=chosen, output_loading_info=True, **options
    )
    keep_text(network)
    require_weights(found["missing_keys"] & network.state_dict().keys(), found["unexpected_keys"])
    return network


def _fill(skeleton: Skeleton, source: str, device: torch.device) -> None:
    with _user_errors(source):
        skeleton.fill(device)


def fill(opened: OpenedModel, model: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Read the weights of `model`, which has the opened network and is sharded. With `offload`, into host memory,
    except for buffers, which every forward pass reads on `device`."""
    opened.fill(torch.device("cpu") if offload else device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


@contextlib.contextmanager
def _user_errors(source: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RefusedObjectError, CopyError) as error:
        raise UserError(f"spec.model.source: {error}") from error
    except StorageAwayError as error:
        raise SourceAwayError(f"cannot load the model: {error}") from error
    except Exception as error:  # transformers, safetensors and the hub's client raise dozens of types
        facts = ErrorFacts.of(error)
        if is_infrastructure_error(facts):
            message = f"cannot load the model from {source}: {summarize(facts)}"
            raise (SourceAwayError if "://" in source else TransientError)(message) from error
        raise UserError(
            f"spec.model.source: cannot load a causal language model from {source}: {summarize(facts)}; "
            "use a Hugging Face folder with config.json and safetensors"
        ) from error


def shard(
    network: Any,
    *,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    keep_gathered: bool,
    offload: bool = False,
    head: Head | None = None,
) -> ScoringModel:
    """Return the sharded model that scores tokens with `network`."""
    model = ScoringModel(network, dtype, head)
    shard_units(model, network, mesh=mesh, dtype=dtype, keep_gathered=keep_gathered, offload=offload)
    return model


def shard_units(
    model: nn.Module,
    network: nn.Module,
    *,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    keep_gathered: bool,
    offload: bool = False,
) -> None:
    """Apply FSDP2 over `mesh` to `model`: one unit per decoder layer of its `network` and one for the rest, so tied
    embeddings share a unit. `offload`: keep the shards and their gradients in host memory. A collective."""
    compute_as_sampled(network)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # On CPUs there is no other memory, and nothing to pin.
    place = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    for layer in decoder_layers(network):
        fully_shard(
            layer, mesh=mesh, mp_policy=precision, reshard_after_forward=not keep_gathered, offload_policy=place
        )
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False, offload_policy=place)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is a sum over tokens, so gradients of the ranks are summed, not averaged.
            module.set_force_sum_reduction_for_comms(True)
            if mesh.size() > 1:  # with one rank, FSDP2 would copy each gradient once more to divide it
                module.set_gradient_divide_factor(1.0)
    use_shared_memory(model, mesh)


def compute_as_sampled(network: nn.Module) -> None:
    """Turn off what is random in training alone, such as the dropout of a configuration: rollouts sample without it.
    The dropout of adapters stays, which is a setting of the job."""
    network.eval()
    for module in network.modules():
        if (dropout := getattr(module, "lora_dropout", None)) is not None:
            dropout.train()


def decoder_layers(network: nn.Module) -> list[nn.Module]:
    """Return the layers that are FSDP units, in their order."""
    kinds = set(getattr(network, "_no_split_modules", None) or [])
    layers = [module for module in network.modules() if type(module).__name__ in kinds]
    if layers:
        return layers
    longest = max((m for m in network.modules() if isinstance(m, nn.ModuleList)), key=len, default=nn.ModuleList())
    return list(longest)
