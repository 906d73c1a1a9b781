"""Which transport a group uses, and that weights without a file have the digest that their file would have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import ENV_HAND_OVER
from rljob_trainer.policy.lora import MergeCost
from rljob_trainer.policy.policy import Published
from rljob_trainer.ranks import actor as weight_transport
from rljob_trainer.ranks.actor import DeviceTransport, FileTransport, build_transport, choose_kind
from rljob_trainer.weights.store import WeightStore
from tests.support.loopback import next_address
from tests.support.weight_files import publish

WEIGHTS = {
    "matrix": torch.randn(64, 64, dtype=torch.bfloat16),
    "norm": torch.ones(64),
    "transposed": torch.randn(64, 128).T,
}


def job_of(num_gpus: int = 0, **rollout: Any) -> RLJob:
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t"}},
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
        "schedule": {"type": "synchronous"},
        "trainer": {"gpusPerReplica": num_gpus},
        "rollout": {"gpusPerReplica": num_gpus} | rollout,
    }
    return RLJob.model_validate({"metadata": {"name": "t"}, "spec": spec})


@pytest.mark.parametrize(
    ("num_gpus", "rollout", "kind"),
    [
        (1, {"placement": "trainer", "weightTransfer": "auto"}, "device"),
        (0, {"placement": "trainer", "weightTransfer": "auto"}, "file"),
        (1, {"weightTransfer": "auto"}, "file"),
        (1, {"placement": "trainer"}, "file"),
        (0, {"placement": "trainer", "weightTransfer": "device"}, "device"),
    ],
)
def test_weights_stay_on_shared_gpus_if_the_job_says_so(num_gpus: int, rollout: dict[str, Any], kind: str) -> None:
    assert choose_kind(job_of(num_gpus, **rollout).spec) == kind


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose collectives need no others."""
    dist = SimpleNamespace(
        get_rank=lambda: 0, all_reduce=lambda tensor, operation: None, ReduceOp=SimpleNamespace(MAX=None)
    )
    monkeypatch.setattr(weight_transport, "dist", dist)
    monkeypatch.setenv("RLJOB_TOKEN", "secret")


def policy_of(setting: str, *, streams: bool = True, num_gpus: int = 0, device: str = "cpu") -> Any:
    spec = job_of(num_gpus, placement="trainer", weightTransfer=setting).spec
    return SimpleNamespace(spec=spec, device=torch.device(device), streams_weights=streams)


def test_adapters_and_converted_weights_go_through_a_file(
    alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv(ENV_HAND_OVER, str(tmp_path))
    transport, why = build_transport(policy_of("auto", streams=False, num_gpus=1), "")
    assert isinstance(transport, FileTransport)
    assert "load an adapter" in why
    with pytest.raises(UserError, match=r"spec.rollout.weightTransfer: device does not work here: .*; set file"):
        build_transport(policy_of("device", streams=False), "")


def test_gpus_that_cannot_share_memory_use_a_file_and_say_why(
    alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv(ENV_HAND_OVER, str(tmp_path))
    monkeypatch.setattr(weight_transport.cuda_ipc, "find_obstacle", lambda device: "operation not supported")
    monkeypatch.setattr(weight_transport, "_agree", lambda obstacle, device: obstacle)
    transport, why = build_transport(policy_of("auto", num_gpus=1, device="cuda"), "")
    assert (transport.kind, why) == ("file", "operation not supported")


def test_the_pods_folder_makes_the_transport_of_the_device(
    alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv(ENV_HAND_OVER, str(tmp_path))
    transport, why = build_transport(policy_of("device"), "")
    assert isinstance(transport, DeviceTransport)
    assert (why, [path.name for path in tmp_path.iterdir()]) == ("", ["cpu.sock"])
    transport.close()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv(ENV_HAND_OVER)
    with pytest.raises(UserError, match=ENV_HAND_OVER):
        build_transport(policy_of("device"), "")


@pytest.mark.parametrize(("min_seconds", "answer_seconds"), [(60, 30.0), (20, 10.0), (7200, 60.0)])
def test_an_engine_that_hangs_is_dropped_before_its_rank_counts_as_hung(
    alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, min_seconds: int, answer_seconds: float
) -> None:
    monkeypatch.setenv(ENV_HAND_OVER, str(tmp_path))
    policy = policy_of("device")
    policy.spec.hang_detection.min_seconds = min_seconds
    transport, _ = build_transport(policy, "")
    assert isinstance(transport, DeviceTransport)
    assert transport.hand_over.answer_seconds == answer_seconds
    transport.close()


@pytest.mark.parametrize("unit", ["element", "word"])
def test_digest_and_size_are_those_of_a_file(unit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(next_address(), "secret")
    try:
        from_file = publish(store, WEIGHTS, "g", 3, unit)
    finally:
        store.close()
    found = weight_transport.digest_published(Published.of(WEIGHTS), "g", 3, unit)
    assert (found.key, found.checksum, found.digest_unit) == ("g:3", from_file.checksum, unit)
    assert found.num_bytes == sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert (found.url, found.file_hash, found.local) == ("", "", None), "there is no file"


def test_a_digest_leaves_the_weights_resizable() -> None:
    """FSDP frees what it gathered by a resize, which torch refuses for memory that numpy has seen."""
    weight = torch.ones(64, 64)
    weight_transport.digest_published(Published.of({"weight": weight}), "g", 0, "word")
    weight.untyped_storage().resize_(0)


def test_share_of_merged_adapters_is_in_the_manifest() -> None:
    cost = MergeCost()
    cost.add(torch.ones(4), torch.ones(4) / 2)
    assert weight_transport.digest_published(Published.of(WEIGHTS, cost), "g", 0, "element").merged_share == cost.share
