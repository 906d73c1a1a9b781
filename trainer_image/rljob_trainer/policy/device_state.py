"""Moves a rank's weights and optimizer state to host memory and back, so that others can use the device in between.

Afterwards all is as under FSDP2's CPUOffloadPolicy: a parameter is a DTensor of the device's mesh, with its shard in
host memory. Buffers stay, as there: they have kilobytes. FSDP2 keeps a second reference to each shard for its
all-gather, with padding (FSDPParam._sharded_param_data). nn.Module._apply, which FSDPModule overrides, is its own way
to replace shards: it changes the content of a parameter, not its identity, and renews that reference
(FSDPParam.reset_sharded_param). On CPUs there is no other memory: only what is gathered and freed goes back.

Invariant: `free` and `restore` change no bit of the state.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rljob_trainer.policy.host_copy import HostBuffers, local_part, with_local
from rljob_trainer.policy.sharding import reshard


class DeviceState:
    """The state of models without gradients. Both methods do nothing the second time."""

    def __init__(
        self, device: torch.device, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._device, self._models, self._optimizers = device, models, optimizers
        self._buffers = HostBuffers()
        self._moved: set[int] = set()
        """Numbers of the tensors that `free` moved. The others are in host memory all the time (trainer.offload)."""
        self.is_free = False

    def free(self) -> None:
        if self.is_free:
            return
        for model in self._models:
            reshard(model)
        held = self._list_tensors()
        self._moved = {i for i, tensor in enumerate(held) if self._is_on_device(tensor)}
        self._replace(held, self._buffers.copy)
        self.is_free = True

    def restore(self) -> None:
        if not self.is_free:
            return
        self._replace(
            self._list_tensors(),
            lambda _, tensor: with_local(tensor, local_part(tensor).to(self._device, non_blocking=True, copy=True)),
        )
        self.is_free = False

    @staticmethod
    def _is_on_device(tensor: Tensor) -> bool:
        return local_part(tensor).device.type != "cpu"

    def _list_tensors(self) -> list[Tensor]:
        """Return all tensors, in the same order each time: tied parameters once, then the optimizers' state."""
        parameters = dict.fromkeys(parameter for model in self._models for parameter in model.parameters())
        states = (state for optimizer in self._optimizers for state in optimizer.state.values())
        return [*parameters, *(value for state in states for value in state.values() if isinstance(value, Tensor))]

    def _replace(self, held: Sequence[Tensor], move: Callable[[int, Tensor], Tensor]) -> None:
        """Replace the moved tensors by what `move` returns for their numbers."""
        if not self._moved:
            return
        new = {id(tensor): move(i, tensor) for i, tensor in enumerate(held) if i in self._moved}
        # Before FSDP2 copies a shard that needs padding, and before the source of a copy is used again.
        torch.get_device_module(self._device).synchronize()
        for model in self._models:
            model._apply(lambda tensor: new.pop(id(tensor), tensor))  # once: tied parameters are visited twice
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                state.update({name: new.pop(id(value), value) for name, value in state.items()})
