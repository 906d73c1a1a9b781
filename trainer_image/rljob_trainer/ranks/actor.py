"""The Ray actor around one rank's Policy: sets its process up, joins the others, and calls what the group asks for.

Rank 0 also serves the weight files. Invariant: an error that says that another rank is gone leaves as RankLostError, so
that the group can tell an infrastructure failure from a mistake in the job.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
import torch.distributed as dist

from rljob_api.errors import RLJobError, UserError
from rljob_api.wire.contract import ENV_POD_IP, ENV_TOKEN
from rljob_api.wire.protocol import WeightManifest
from rljob_trainer.policy import checkpoints
from rljob_trainer.policy.micro_batches import MicroBatch, RankPlan
from rljob_trainer.policy.policy import Policy, PolicySettings, RankMetrics
from rljob_trainer.ranks.errors import RankLostError
from rljob_trainer.ranks.process_setup import ENV_NUM_THREADS, choose_num_threads, join_process_group, keep_freed_memory
from rljob_trainer.weights.store import WeightStore

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_COLLECTIVE_WORDS = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "tcpstore",
    "timed out",
)

Method = TypeVar("Method", bound=Callable[..., Any])


def _typed_errors(method: Method) -> Method:
    """Give errors a type before they cross Ray, where only their text would be left."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RLJobError:
            raise
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"a trainer rank ran out of device memory: {error}. Lower spec.trainer.microBatchTokens, "
                "set spec.trainer.gradientCheckpointing, or use more ranks"
            ) from None
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or any(word in str(error).lower() for word in _COLLECTIVE_WORDS):
                raise RankLostError(str(error).splitlines()[0]) from None
            raise

    return call  # type: ignore[return-value]


class RankProcess:
    """One rank. Methods that the group calls on all ranks at once are collectives."""

    def __init__(self) -> None:
        keep_freed_memory()
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.address = os.environ.get(ENV_POD_IP) or ray.util.get_node_ip_address()
        self._store: WeightStore | None = None

    def describe(self) -> tuple[str, str, int]:
        """Address, machine, and process id."""
        machine = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
        return self.address, machine, os.getpid()

    def free_port(self) -> int:
        """A port for the ranks to meet at, on this rank's address."""
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            return int(probe.getsockname()[1])

    @_typed_errors
    def start(
        self,
        rank: int,
        num_ranks: int,
        num_local_ranks: int,
        rendezvous: tuple[str, int],
        settings: PolicySettings,
        checkpoint: Path | None,
    ) -> bool:
        """Join the others and load. Returns whether prompts may be shared in this model's rows."""
        self.rank = rank
        if self.device.type == "cpu":
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(choose_num_threads(cores, num_local_ranks, os.environ.get(ENV_NUM_THREADS)))
        join_process_group(rank, num_ranks, *rendezvous, self.device)
        self.policy = Policy(settings, self.device)
        if checkpoint is not None:
            checkpoints.load_checkpoint(self.policy, checkpoint)
        return self.policy.can_share_prompts

    @_typed_errors
    def update(self, plan: RankPlan) -> RankMetrics:
        return self.policy.update(plan)

    def set_total_updates(self, total_updates: int) -> None:
        self.policy.set_total_updates(total_updates)

    @_typed_errors
    def compute_logprobs(self, batches: list[MicroBatch]) -> list[list[float]]:
        return [logprobs.tolist() for logprobs in self.policy.compute_logprobs(batches)]

    @_typed_errors
    def publish(self, generation: str, version: int) -> WeightManifest | None:
        """Rank 0 writes the file and returns its manifest, after all ranks have gathered every parameter."""
        weights = self.policy.gather_weights()
        if self.rank != 0:
            return None
        if self._store is None:
            self._store = WeightStore(self.address, os.environ.get(ENV_TOKEN, ""))
            self._store.start()
        return self._store.publish(weights, generation, version)

    @_typed_errors
    def save(self, folder: Path) -> None:
        checkpoints.save_checkpoint(self.policy, folder)

    @_typed_errors
    def export(self, folder: Path, tokenizer_source: str) -> None:
        checkpoints.export_model(self.policy, folder, tokenizer_source)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
