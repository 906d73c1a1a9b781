"""What a rank sets up before it joins the others: its device, memory and threads."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_inputs.models.defaults import resolve_job
from rljob_trainer.ranks import actor
from rljob_trainer.ranks.actor import RankProcess, choose_num_threads
from rljob_trainer.run_folder.file_facts import Checkpoint


@pytest.mark.parametrize(
    ("num_cores", "num_local_ranks", "requested", "expected"), [(8, 2, None, 4), (2, 4, None, 1), (2, 4, "3", 3)]
)
def test_ranks_share_the_cores_unless_the_user_sets_a_number(num_cores, num_local_ranks, requested, expected):
    assert choose_num_threads(num_cores, num_local_ranks, requested) == expected


class _JoinedError(Exception):
    """Ends the start of a rank before it joins others."""


def start_rank(monkeypatch, num_gpus, device=None, offload="none", checkpoint=None, **spec):
    """Start a rank up to the process group, or what follows its checkpoint. Return what it set up before, and why it
    ended."""
    calls = []
    trainer = {"replicas": 1, "gpusPerReplica": num_gpus, "offload": offload}
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t"}},
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
        "trainer": trainer,
        **spec,
    }
    job = resolve_job(RLJob.model_validate({"metadata": {"name": "t"}, "spec": spec}), None)
    monkeypatch.setenv("RLJOB_POD_IP", "127.0.0.1")
    monkeypatch.setattr(actor, "keep_freed_memory", lambda: calls.append("mallopt"))
    monkeypatch.setattr(actor, "configure_allocator", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: calls.append("threads"))
    if device is not None:
        monkeypatch.setattr(actor, "choose_device", lambda *_: device)

    def join(rank, num_ranks, address, port, device):
        calls.append(str(device))
        if checkpoint is None:
            raise _JoinedError

    monkeypatch.setattr(actor, "join_process_group", join)
    rank = RankProcess()
    with pytest.raises((_JoinedError, UserError)) as caught:
        rank.start(0, 1, 1, ("127.0.0.1", 1), job, "/m", None, checkpoint)
    return calls, caught.value


def test_rank_counts_the_updates_of_a_checkpoint_by_the_mini_batches_of_now(monkeypatch):
    """The warm start ends, and learning rates follow, by the number of updates. The checkpoint was written with one
    mini-batch a step."""
    policy = SimpleNamespace(num_updates=3)
    monkeypatch.setattr(actor, "Policy", lambda *_: policy)
    monkeypatch.setattr(actor, "reach", lambda run, folder, token: folder)
    monkeypatch.setattr(actor.checkpoints, "verify_checkpoint", lambda *_: None)
    monkeypatch.setattr(actor.checkpoints, "load_checkpoint", lambda *_: None)
    monkeypatch.setattr(actor, "CheckpointSaver", mock.Mock(side_effect=_JoinedError))
    checkpoint = Checkpoint(Path("/run/checkpoints/step-000003"), {})
    start_rank(monkeypatch, num_gpus=0, checkpoint=checkpoint, schedule={"promptsPerStep": 8, "miniBatches": 4})
    assert policy.num_updates == 12


def test_rank_that_finds_no_gpu_ends_before_it_joins_the_others(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    calls, error = start_rank(monkeypatch, num_gpus=2)
    assert "spec.trainer.gpusPerReplica is 2, and torch finds no GPU" in str(error)
    assert calls == []


def test_rank_without_gpus_in_the_spec_uses_the_cpu_of_a_node_with_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert start_rank(monkeypatch, num_gpus=0)[0] == ["mallopt", "threads", "cpu"]


def test_allocator_and_threads_are_set_for_cpu_ranks_alone(monkeypatch):
    assert start_rank(monkeypatch, num_gpus=1, device=torch.device("cuda", 0))[0] == ["cuda:0"]


def test_optimizer_on_the_host_of_a_gpu_gets_the_threads_of_its_rank(monkeypatch):
    gpu = torch.device("cuda", 0)
    assert start_rank(monkeypatch, 2, gpu)[0] == ["cuda:0"]
    assert start_rank(monkeypatch, 2, gpu, offload="all")[0] == ["threads", "cuda:0"]


def test_store_of_the_ranks_listens_on_its_address_alone():
    address, timeout = "127.93.1.1", timedelta(seconds=20)
    with socket.create_server((address, 0)) as probe:
        port = probe.getsockname()[1]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(actor.open_store, 0, 2, address, port, timeout)
        second = pool.submit(actor.open_store, 1, 2, address, port, timeout)
        first.result().set("key", "value")
        assert second.result().get("key") == b"value"
        for other in ("127.0.0.1", "127.93.1.2"):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, port), timeout=5)
        with pytest.raises(dist.DistNetworkError, match=f"cannot listen on {address}:{port}"):
            actor.open_store(0, 2, address, port, timeout)
