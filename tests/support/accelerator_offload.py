"""Program of test_offload: `python -m tests.support.accelerator_offload` runs an update of a policy with a reference
model and a critic on an accelerator of fake tensors, for each value of trainer.offload.

Prints which tensors are on which type of device, as JSON. The model is built, sharded and filled as a real one is, but
without a file, and with torch's fake process group: rank 0 of 2.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "bench"))

from memory_plan import accelerator, tracker
from memory_plan.cases import SMOLLM2_135M, Case

from rljob_trainer.policy import optimizer, policy, sharding

VALUES = ("none", "reference", "all")
_SMALL = SMOLLM2_135M | {"num_hidden_layers": 2}
_MODE = sharding.ShardingMode(keep_gathered=False, reduce_once=False)


def find_devices(offload: str, device: torch.device) -> dict[str, list[str]]:
    case = Case("", _SMALL, 2, 2, 64, _MODE, has_reference=True, has_critic=True, offload=offload)
    with tracker.replacements(case, device), FakeTensorMode(allow_non_fake_inputs=True):
        rank = policy.Policy(case.build_job(), "/model", device)
        assert rank.critic is not None
        assert rank.reference is not None
        rank.accumulate([tracker.build_batch(case)] * 2)
        found = {
            "published": (tensor for _, tensor in rank.stream_published().tensors),
            "buffers": rank.model.buffers(),
        }
        rank.reshard()
        rank.critic.reshard()
        for name, model, state in (
            ("policy", rank.model, rank.optimizer),
            ("reference", rank.reference, None),
            ("critic", rank.critic.model, rank.critic.optimizer),
        ):
            found[name] = model.parameters()
            if state is not None:
                found[f"{name} gradients"] = (each.grad for each in model.parameters())
                found[f"{name} moments"] = (value for each in state.state.values() for value in each.values())
        types = {name: sorted({each.device.type for each in tensors}) for name, tensors in found.items()}
        return types | {"summed norm": [find_device_of_norm(rank.optimizer)]}


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


if __name__ == "__main__":
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    accelerator_device = accelerator.register()
    print(json.dumps({value: find_devices(value, accelerator_device) for value in VALUES}))
