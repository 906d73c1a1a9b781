"""One rank of the policy: an FSDP2 module with its optimizer. Plain torch.distributed: no Ray, no HTTP.

An update is any number of `accumulate`, then one `apply`. Every method is a collective: all ranks call it in the same
order, with equally many micro-batches. Invariant: an update depends only on parameters, optimizer state, its index and
the micro-batches.

It publishes names, shapes and dtypes first, then the tensors, one at a time as they are gathered.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from rljob_api.manifest.algorithm import Optimizer
from rljob_api.manifest.job import RLJob
from rljob_inputs.memory.plan import ModelFacts, Question, plan_update
from rljob_inputs.models.config import publishes_adapter
from rljob_trainer.algorithms.base import LossInputs
from rljob_trainer.algorithms.losses import loglinear_proximal, update_loss
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.episodes.types import TokenFacts
from rljob_trainer.policy import attention, optimizer, sharding
from rljob_trainer.policy.arrays import to_device
from rljob_trainer.policy.checkpoint_names import engine_parameters, to_checkpoint
from rljob_trainer.policy.compilation import CompiledLayers, prepare_layers, start_compiler
from rljob_trainer.policy.critic import Critic
from rljob_trainer.policy.host_copy import DeviceState
from rljob_trainer.policy.layout import MicroBatch
from rljob_trainer.policy.lora import Adapters, MergeCost
from rljob_trainer.policy.model_loading import (
    OpenedModel,
    ScoringModel,
    compute_as_sampled,
    decoder_layers,
    fill,
    open_network,
    shard,
)
from rljob_trainer.policy.optimizer import learning_rate
from rljob_trainer.policy.selected_logprobs import Head, compile_arithmetic
from rljob_trainer.policy.text_model import describe_config, require_decoder
from rljob_trainer.policy.update_metrics import RankMetrics, TokenMetrics

log = logging.getLogger(__name__)

_PREFIX = "network."
"""Prefix of parameter names in ScoringModel; the rest is the Hugging Face name."""


class Policy:
    def __init__(self, job: RLJob, model: str, device: torch.device) -> None:
        """`model`: the resolved source of spec.model: a folder, or hf://org/name."""
        self._job, self.spec, self.source, self.device = job, job.spec, model, device
        self.algorithm, self._code = job.spec.algorithm, build_algorithm(job.spec)
        self.dtype: torch.dtype = getattr(torch, job.spec.trainer.dtype)
        torch.manual_seed(job.spec.schedule.seed + dist.get_rank())
        if device.type == "cpu":
            torch.set_flush_denormal(True)
        has_reference, has_critic = self.algorithm.kl.coefficient > 0, self._code.needs.values
        lora = job.spec.trainer.lora
        self._gpu_bytes = sharding.find_smallest_memory(device)
        opened = self._load(torch.float32 if lora is None else self.dtype)
        network = opened.network
        self.adapters: Adapters | None = None
        if lora is not None:
            self.adapters = Adapters(network, lora, base=model, seed=job.spec.schedule.seed)
        self.config, self.generation_config = network.config, getattr(network, "generation_config", None)
        self._publishes_adapter = publishes_adapter(job.spec, describe_config(self.config))
        self.layout = attention.find_layout(require_decoder(network))
        self.other_tensors = opened.other_tensors
        counts = {True: 0, False: 0}
        for parameter in network.parameters():
            counts[parameter.requires_grad] += parameter.numel()
        num_trained, num_frozen = counts[True], counts[False]
        num_copied = num_trained if lora is None else num_frozen
        self._mode = sharding.choose_mode(
            num_trained + num_copied * has_critic,
            num_frozen + num_copied * (has_reference and lora is None),
            self.dtype,
            self._gpu_bytes,
        )
        self._mesh = sharding.build_mesh(device)
        self.model = self._shard(opened, offload=job.spec.trainer.offloads_state)
        if self.adapters is not None:
            self.adapters.find_shards(self.model, _PREFIX)
        self.optimizer = optimizer.build_optimizer(self.model, self.algorithm.optimizer)
        self.num_updates = 0
        self._num_warm = job.spec.schedule.num_warm_steps * job.spec.schedule.mini_batches
        # FSDP creates its streams in the first forward. Before that, parameters can only be gathered one by one.
        self._has_run_forward = False

        self._metrics = TokenMetrics()
        self._has_reference = has_reference
        self.doing = ""
        """The micro-batch that runs, or ran last, in the last `accumulate`."""
        self.reference: ScoringModel | None = None
        """A frozen copy of the initial model. With LoRA there is none: `model` without its adapters is the same."""
        if has_reference and lora is None:
            reference = self._shard(self._load(self.dtype), offload=job.spec.trainer.offloads_reference)
            self.reference = reference.requires_grad_(False).eval()
        self.critic: Critic | None = None
        if has_critic:
            settings, source = self.algorithm.critic, self._load(torch.float32)
            self.critic = Critic(
                source,
                settings,
                mesh=self._mesh,
                mode=self._mode,
                dtype=self.dtype,
                device=device,
                offload=job.spec.trainer.offloads_state,
            )
        self._device_state = DeviceState(device, *self._list_models())

    def inspect(self, batches: Sequence[MicroBatch]) -> list[TokenFacts]:
        """Return what the algorithm needs to know about each micro-batch before it computes advantages."""
        references = self._reference_logprobs(batches)
        values = [None] * len(batches) if self.critic is None else self.critic.values(batches)
        return [TokenFacts(_to_numpy(logprobs), _to_numpy(v)) for logprobs, v in zip(references, values, strict=True)]

    def score(self, batches: Sequence[MicroBatch]) -> list[TokenFacts]:
        """Return the policy's log-probs of each micro-batch's targets at temperature 1."""
        self._has_run_forward = True
        self.model.eval()  # without the dropout of adapters
        # Compiled for these rows alone, layers would cost more than the rows.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found = [TokenFacts(logprobs=_to_numpy(self.model(batch)[0])) for batch in batches]
        compute_as_sampled(self.model.network)
        self.reshard()
        return found

    def accumulate(self, batches: Sequence[MicroBatch]) -> None:
        """Add the gradient of the micro-batches' loss to what the next `apply` uses."""
        references = [None] * len(batches) if self.is_warm else self._reference_logprobs(batches)
        self._has_run_forward = True
        for i, (batch, reference) in enumerate(zip(batches, references, strict=True)):
            self.doing = f"micro-batch {i + 1} of {len(batches)}"
            sharding.expect_backward(self.model, self._mode, is_last=i == len(batches) - 1)
            (self._loss(batch, reference) * optimizer.loss_scale(self.dtype)).backward()
        if self.critic is not None and not self.is_warm:
            self.critic.accumulate(batches)

    def backward(self, batches: Sequence[MicroBatch], loss: Callable[[MicroBatch, Tensor], Tensor]) -> list[TokenFacts]:
        """Add the gradient of each micro-batch's `loss`, of its targets' log-probs, to what the next update uses.
        Return the log-probs."""
        self._has_run_forward = True
        found = []
        for i, batch in enumerate(batches):
            self.doing = f"micro-batch {i + 1} of {len(batches)}"
            sharding.expect_backward(self.model, self._mode, is_last=i == len(batches) - 1)
            logprobs = self.model(batch)[0]
            (loss(batch, logprobs) * optimizer.loss_scale(self.dtype)).backward()
            found.append(TokenFacts(logprobs=_to_numpy(logprobs.detach())))
        return found

    def apply(self, denominator: float) -> RankMetrics:
        """Run one optimizer update with the gradient over `denominator`. With 0, or with a gradient that is not
        finite, nothing changes but the number of updates."""
        sums, maxima = self._metrics.reduce()
        self._metrics = TokenMetrics()
        rate = self._learning_rate(self.algorithm.optimizer)
        norm = optimizer.update(self.model, self.optimizer, self.algorithm.optimizer, denominator, rate, self.dtype)
        if not math.isfinite(norm):
            log.warning("update %d: the gradient's norm is %s; the update is skipped", self.num_updates, norm)
        critic = None
        if self.critic is not None and not self.is_warm:
            critic = self.critic.apply(denominator, self._learning_rate(self.algorithm.critic))
        self.num_updates += 1
        return RankMetrics(sums, maxima, norm, rate, is_skipped=not math.isfinite(norm), critic=critic)

    @property
    def is_warm(self) -> bool:
        """Whether the next update is one of the warm start, on given rows: by cross-entropy, without a reference model,
        and not of the critic."""
        return self.num_updates < self._num_warm

    def _learning_rate(self, settings: Optimizer) -> float:
        """Return the rate of the next update. The warm start is as long a job of its own, and RL another one."""
        schedule, warm = self.spec.schedule, self.spec.schedule.warm_start
        if not self.is_warm or warm is None:
            total = schedule.steps * schedule.mini_batches
            return learning_rate(settings, self.num_updates - self._num_warm, total - self._num_warm)
        own = {"learning_rate": warm.learning_rate or settings.learning_rate}
        return learning_rate(settings.model_copy(update=own), self.num_updates, self._num_warm)

    def gather_weights(self, cost: MergeCost | None = None) -> dict[str, Tensor]:
        """Return what _stream_weights yields on rank 0's CPU, valid until the next update; {} on other ranks.

        The parameters stay gathered for the next forward, so publishing costs no extra transfer.
        """
        return {name: tensor.cpu() for name, tensor in self._stream_weights(cost) if dist.get_rank() == 0}

    @property
    def streams_weights(self) -> bool:
        """Whether what rollouts load are weights that each rank can gather one by one. A collective the first time."""
        return not self._publishes_adapter and self._published is not CONVERTED

    def stream_published(self, *, on_all_ranks: bool = False) -> Published:
        """Return what rollouts load: all weights as in a checkpoint, or the adapters. `on_all_ranks`: each rank yields
        them, if it `streams_weights`."""
        if self.adapters is not None and self._publishes_adapter:
            adapters = self.adapters.scale(self.adapters.gather())
            return Published.of({name: tensor.to(self.dtype) for name, tensor in adapters.items()})
        cost = MergeCost() if self.adapters is not None else None
        if self._published is not CONVERTED:
            is_plain = has_plain_matrices(self.model.network)
            return Published(self._published, self._stream_weights(cost, on_all_ranks=on_all_ranks), is_plain, cost)
        return Published.of(to_checkpoint(self.model.network, self.gather_weights(cost)), cost)

    def free(self) -> None:
        """Move weights and optimizer state to host memory. Checkpoints and exports work as before; inspect, accumulate
        and apply work again after `restore`. Call it without gradients, after `apply`."""
        self._device_state.free()

    def restore(self) -> None:
        """Undo `free`."""
        self._device_state.restore()

    def reshard(self) -> None:
        """Free what the last forward gathered, so that parameters are the shards that the optimizer updates."""
        sharding.reshard(self.model)

    @cached_property
    def _published(self) -> dict[str, Tensor]:
        """All weights on the meta device; CONVERTED if a checkpoint holds them otherwise. Found by a collective."""
        parameters: Iterator[tuple[str, Tensor]] = (
            (name.removeprefix(_PREFIX), torch.empty(parameter.shape, dtype=self.dtype, device="meta"))
            for name, parameter in self.model.named_parameters()
        )
        if self.adapters is not None:
            adapters = {name: tensor.to("meta") for name, tensor in self.adapters.gather().items()}
            parameters = self.adapters.merge(parameters, adapters)
        buffers = engine_parameters(self.model.network)
        described = dict(parameters) | {name: buffer.to("meta") for name, buffer in buffers.items()}
        converted = to_checkpoint(self.model.network, described)
        is_same = converted.keys() == described.keys() and all(converted[name] is described[name] for name in described)
        return described if is_same else CONVERTED

    def _stream_weights(
        self, cost: MergeCost | None = None, *, on_all_ranks: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights on this device, on rank 0 with the adapters added: parameters in the compute dtype, then
        those that are buffers here in their own. A collective. `cost`: gets that of the sum. `on_all_ranks`: not on
        rank 0 alone."""
        adapters = {} if self.adapters is None else self.adapters.gather()
        gathered = self._gather_parameters()
        if self.adapters is not None and (on_all_ranks or dist.get_rank() == 0):
            gathered = self.adapters.merge(gathered, adapters, cost)
        yield from gathered
        yield from engine_parameters(self.model.network).items()

    def _gather_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters in the compute dtype on this device. A collective: all ranks take every one."""
        if self._mode.keep_gathered and self._has_run_forward and not self._device_state.is_free:
            sharding.unshard(self.model)
            for name, parameter in self.model.named_parameters():
                yield name.removeprefix(_PREFIX), parameter.detach()
            return
        self.reshard()
        for name, parameter in self.model.named_parameters():
            yield name.removeprefix(_PREFIX), sharding.gather(parameter, self.dtype)

    def _loss(self, batch: MicroBatch, reference: Tensor | None) -> Tensor:
        logprobs, entropy, top = self.model(batch, bool(self.algorithm.entropy_coefficient))
        rollout_logprobs = logprobs.detach() if self.is_warm else self._tensor(batch.rollout_logprobs)
        inputs = LossInputs(
            logprobs=logprobs,
            proximal_logprobs=loglinear_proximal(logprobs, rollout_logprobs, self._tensor(batch.proximal_shares)),
            rollout_logprobs=rollout_logprobs,
            advantages=self._tensor(batch.advantages),
            rows=self._tensor(batch.rows).long(),
            num_rows=len(batch.row_indices),
        )
        weights = self._tensor(batch.weights)
        terms = update_loss(
            self._code,
            inputs,
            weights=weights,
            entropy=entropy,
            reference_logprobs=reference,
            top=None if batch.top is None else (top, self._tensor(batch.top["logprob"])),
            is_given=self.is_warm,
        )
        self._metrics.add(terms.sums, terms.maxima)
        return terms.loss

    def _reference_logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Return the reference model's log-probs of each micro-batch, as given or computed."""
        if not self._has_reference:
            return [None] * len(batches)
        found: list[Tensor | None] = []
        with torch.no_grad(), self._use_reference() as reference:
            for batch in batches:
                given = batch.reference_logprobs
                found.append(reference(batch)[0] if given is None else self._tensor(given))
        return found

    @contextlib.contextmanager
    def _use_reference(self) -> Iterator[ScoringModel]:
        if self.adapters is not None:
            self._has_run_forward = True
            with self.adapters.disabled():
                yield self.model
        else:
            assert self.reference is not None
            yield self.reference
            sharding.reshard(self.reference)

    def _load(self, dtype: torch.dtype) -> OpenedModel:
        trainer = self.spec.trainer
        opened = open_network(
            self.source,
            dtype=dtype,
            attention=trainer.attention,
            options=self.source_options,
            max_model_len=self.spec.rollout.max_model_len,
        )
        decoder = require_decoder(opened.network)
        attention.install(decoder, trainer.attention, dtype=self.dtype, device=self.device)
        compiled = start_compiler(trainer.compile, decoder=decoder, device=self.device)
        network = opened.network
        facts = ModelFacts(network.config.to_dict(), sum(parameter.numel() for parameter in network.parameters()))
        self.plan = plan_update(Question(self._job, {self.spec.model.source: facts}, self._gpu_bytes))
        prepare_layers(decoder_layers(opened.network), self.plan.recomputation, compiled=compiled)
        self.is_compiled = compiled is not None
        self._head = Head(
            None if trainer.head_dtype == "model" else getattr(torch, trainer.head_dtype),
            compile_arithmetic(CompiledLayers(is_required=compiled.is_required, name="head")) if compiled else None,
            self.plan.kept_logits_bytes,
        )
        return opened

    @property
    def source_options(self) -> dict[str, Any]:
        model = self.spec.model
        return {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}

    def _shard(self, opened: OpenedModel, *, offload: bool) -> ScoringModel:
        gathered = self._mode.keep_gathered
        model = shard(
            opened.network,
            mesh=self._mesh,
            dtype=self.dtype,
            keep_gathered=gathered,
            offload=offload,
            head=self._head,
        )
        fill(opened, model, self.device, offload=offload)
        return model

    def _list_models(self) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        """Return all models and optimizers of this rank."""
        models: list[torch.nn.Module] = [self.model]
        optimizers: list[torch.optim.Optimizer] = [self.optimizer]
        if self.reference is not None:
            models.append(self.reference)
        if self.critic is not None:
            models.append(self.critic.model)
            optimizers.append(self.critic.optimizer)
        return models, optimizers

    def _tensor(self, values: Any) -> Tensor:
        return to_device(values, self.device)


def _to_numpy(values: Tensor | None) -> NDArray[Any] | None:
    return None if values is None else values.cpu().numpy()


CONVERTED: dict[str, Tensor] = {}
"""Stands for parameters that a checkpoint holds otherwise: they are converted once all are gathered."""


@dataclass(frozen=True)
class Published:
    """A collective: every rank takes all tensors. Those of rank 0 are published."""

    described: Mapping[str, Tensor]
    """On the meta device. The tensors have these names, shapes and dtypes."""
    tensors: Iterator[tuple[str, Tensor]]
    has_plain_matrices: bool
    """Whether engines hold all matrices as they are, or fused and cut: not padded within rows, nor transposed."""
    merge_cost: MergeCost | None = None
    """Cost of adapters that are merged, once all tensors are taken; on rank 0."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], merge_cost: MergeCost | None = None) -> Published:
        """Describe tensors that are gathered."""
        described = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        return cls(described, iter(tensors.items()), has_plain_matrices=False, merge_cost=merge_cost)


def has_plain_matrices(network: nn.Module) -> bool:
    """Whether all parameters with more than one dimension are those of linear layers and embeddings."""
    others = (module for module in network.modules() if not isinstance(module, nn.Linear | nn.Embedding))
    return all(parameter.dim() < 2 for module in others for parameter in module.parameters(recurse=False))
