"""Program of test_offload: `main(FOLDER)` runs an update of a policy with a reference model and a critic on an
accelerator of fake tensors, for each value of trainer.offload, frees it, and runs another one.

Writes which tensors are on which type of device to FOLDER/devices.json. The model is built, sharded and filled as a
real one is, but without a file, and with torch's fake process group: rank 0 of 2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from memory_plan import accelerator, tracker
from memory_plan.cases import SMOLLM2_135M, Case
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from rljob_trainer.policy import optimizer, policy, sharding
from rljob_trainer.policy.host_copy import local_part

VALUES = ("none", "reference", "all")
_SMALL = SMOLLM2_135M | {"num_hidden_layers": 1}
_MODE = sharding.ShardingMode(keep_gathered=False, reduce_once=False)


def find_devices(offload: str, device: torch.device) -> dict[str, list[str]]:
    case = Case("", _SMALL, 2, 2, 64, _MODE, has_reference=True, has_critic=True, offload=offload)
    with tracker.replacements(case, device), FakeTensorMode(allow_non_fake_inputs=True):
        rank = policy.Policy(case.build_job(), "/model", device)
        assert rank.critic is not None
        assert rank.reference is not None
        rank.accumulate([tracker.build_batch(case)])
        found: dict[str, Iterable[torch.Tensor]] = {
            "published": (tensor for _, tensor in rank.stream_published().tensors),
            "buffers": rank.model.buffers(),
        }
        rank.reshard()
        rank.critic.reshard()
        found |= list_state(rank)
        types = list_types(found)
        types["summed norm"] = [find_device_of_norm(rank.optimizer)]
        for of in (rank.optimizer, rank.critic.optimizer):
            of.zero_grad()
        rank.free()
        types |= {f"freed {name}": each for name, each in list_types(list_state(rank)).items()}
        types["freed published"] = list_types({"": (tensor for _, tensor in rank.stream_published().tensors)})[""]
        rank.restore()
        rank.accumulate([tracker.build_batch(case)])
        rank.reshard()
        rank.critic.reshard()
        return types | {f"restored {name}": each for name, each in list_types(list_state(rank)).items()}


def list_state(rank: policy.Policy) -> dict[str, Iterable[torch.Tensor]]:
    """Return parameters, gradients and optimizer state by the model, and what FSDP2 gathers."""
    assert rank.critic is not None
    assert rank.reference is not None
    found: dict[str, Iterable[torch.Tensor]] = {}
    for name, model, state in (
        ("policy", rank.model, rank.optimizer),
        ("reference", rank.reference, None),
        ("critic", rank.critic.model, rank.critic.optimizer),
    ):
        units = [each for each in model.modules() if isinstance(each, FSDPModule)]
        groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
        found[name] = [*model.parameters(), *(each._sharded_param_data for g in groups for each in g.fsdp_params)]
        if state is not None:
            found[f"{name} gradients"] = [each.grad for each in model.parameters() if each.grad is not None]
            found[f"{name} moments"] = [value for each in state.state.values() for value in each.values()]
    return found


def list_types(found: Mapping[str, Iterable[torch.Tensor]]) -> dict[str, list[str]]:
    """Return the types of the devices of tensors, and of their parts on this rank."""
    parts = {name: [part for each in tensors for part in (each, local_part(each))] for name, tensors in found.items()}
    return {name: sorted({each.device.type for each in tensors}) for name, tensors in parts.items()}


def find_device_of_norm(of: torch.optim.AdamW) -> str:
    """Return where the ranks sum the squares of the gradients. A fake sum has no value, so the step ends there."""
    with mock.patch.object(optimizer.dist, "all_reduce", side_effect=_SummedError) as summed:
        try:
            optimizer.step(of, divisor=1.0, max_norm=1.0, rate=1.0)
        except _SummedError:
            return str(summed.call_args.args[0].device.type)
    raise AssertionError("the ranks do not sum the norms of their gradients")


class _SummedError(Exception):
    """Ends a step of the optimizer."""


def main(folder: Path) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    device = accelerator.register()
    (folder / "devices.json").write_text(json.dumps({value: find_devices(value, device) for value in VALUES}))
