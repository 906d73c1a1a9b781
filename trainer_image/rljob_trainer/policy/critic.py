"""The critic of ppo: a value model with the policy's architecture, sharded like the policy, with its own AdamW.

The value of a sampled token is that of the text before it: from the hidden state that also predicts the token. Every
method is a collective, with plans of the same shape on all ranks. An update is any number of `accumulate`, then one
`apply`. Invariant: it depends only on parameters, optimizer state, the learning rate and the micro-batches.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

from rljob_api.manifest.algorithm import Critic as CriticSettings
from rljob_trainer.algorithms.ppo import value_loss
from rljob_trainer.policy import optimizer, sharding
from rljob_trainer.policy.arrays import to_device
from rljob_trainer.policy.layout import MicroBatch
from rljob_trainer.policy.model_loading import OpenedModel, fill, shard_units, source_states
from rljob_trainer.policy.text_model import require_decoder
from rljob_trainer.policy.update_metrics import CriticMetrics, TokenMetrics

log = logging.getLogger(__name__)


class ValueModel(nn.Module):
    """A decoder and a scalar head. A new head is zero: until the critic has learned, every value is 0."""

    def __init__(self, network: Any, dtype: torch.dtype) -> None:
        """`network`: a causal language model, whose own head is dropped."""
        super().__init__()
        self.network, self.dtype = require_decoder(network), dtype
        weight = network.get_output_embeddings().weight
        self.head = nn.Linear(weight.shape[1], 1, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch, device: torch.device) -> Tensor:  # [targets] fp32
        states = source_states(self.network, batch, device, self.dtype)
        # In fp32: a bf16 product has 3 digits.
        return nn.functional.linear(states.float(), self.head.weight.float(), self.head.bias.float()).squeeze(1)


class Critic:
    def __init__(
        self,
        opened: OpenedModel,
        settings: CriticSettings,
        *,
        mesh: DeviceMesh,
        mode: sharding.ShardingMode,
        dtype: torch.dtype,
        device: torch.device,
        offload: bool = False,
    ) -> None:
        """`opened`: the policy's initial causal language model, in fp32. `offload`: keep its state in host memory."""
        self._settings, self._mode, self._dtype, self._device = settings, mode, dtype, device
        self.model = ValueModel(opened.network, dtype)
        shard_units(
            self.model, self.model.network, mesh=mesh, dtype=dtype, keep_gathered=mode.keep_gathered, offload=offload
        )
        fill(opened, self.model, device, offload=offload)
        self.optimizer = optimizer.build_optimizer(self.model, settings)
        self._metrics = TokenMetrics()

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the value of each micro-batch's targets, in fp32 on the CPU."""
        with torch.no_grad():
            values = [self.model(batch, self._device).cpu() for batch in batches]
        sharding.reshard(self.model)
        return values

    def accumulate(self, batches: Sequence[MicroBatch]) -> None:
        """Add the gradient of the weighted sum of the targets' losses. The micro-batches have `returns`, `values`."""
        for i, batch in enumerate(batches):
            sharding.expect_backward(self.model, self._mode, is_last=i == len(batches) - 1)
            values = self.model(batch, self._device)
            weights, before, returns = map(self._tensor, (batch.weights, batch.values, batch.returns))
            losses, clipped = value_loss(values, before, returns, self._settings.value_clip)
            ((losses * weights).sum() * optimizer.loss_scale(self._dtype)).backward()
            is_counted = weights > 0
            self._metrics.add(
                {
                    "num_tokens": is_counted.sum(),
                    "loss": (losses * is_counted).sum(),
                    "clipped": (clipped & is_counted).sum(),
                    "squared_error": ((values - returns).square() * is_counted).sum(),
                },
                {},
            )

    def apply(self, denominator: float, rate: float) -> CriticMetrics:
        """Run one optimizer update with the gradient over `denominator` and the learning `rate`. With 0, or with a
        gradient that is not finite, no parameter changes."""
        sums, _ = self._metrics.reduce()
        self._metrics = TokenMetrics()
        norm = optimizer.update(self.model, self.optimizer, self._settings, denominator, rate, self._dtype)
        if not math.isfinite(norm):
            log.warning("the norm of the critic's gradient is %s; its update is skipped", norm)
        num_tokens = max(1.0, sums.get("num_tokens", 0.0))
        return CriticMetrics(
            loss=sums.get("loss", 0.0) / num_tokens,
            squared_error=sums.get("squared_error", 0.0) / num_tokens,
            clip_fraction=sums.get("clipped", 0.0) / num_tokens,
            grad_norm=norm,
        )

    def state(self) -> dict[str, Any]:
        """Return parameters and optimizer state, for a checkpoint to save or to load in place."""
        self.reshard()
        model, state = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": state}

    def load_state(self, state: dict[str, Any]) -> None:
        with optimizer.keeping_settings(self.optimizer):
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )

    def reshard(self) -> None:
        """Free what the last forward gathered, so that parameters are the shards that the optimizer updates."""
        sharding.reshard(self.model)

    def _tensor(self, values: Any) -> Tensor:
        return to_device(values, self._device)
