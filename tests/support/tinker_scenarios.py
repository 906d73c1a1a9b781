"""Program of test_slot: `main(FOLDER)` trains a client's adapter with one FSDP2 rank and two.

Writes FOLDER/NAME-RANKS.pt for the test.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401 - before the fork

from rljob_trainer.episodes.types import TrainRow
from rljob_trainer.policy import checkpoints
from rljob_trainer.policy.layout import divide_rows
from rljob_trainer.ranks.actor import FileTransport
from rljob_trainer.tinker import slot
from tests.support.lora_scenarios import initial_adapter
from tests.support.policy_scenarios import PLAIN, VOCABULARY, Scenarios, build_inputs
from tests.support.rank_programs import run_on_ranks

MAX_RANK, RANK = 8, 4
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
MODELS = {"one": (RANK, 1), "two": (2, 7), "three": (MAX_RANK, 3)}
"""Rank and seed of the models that are trained side by side."""
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.1, "grad_clip_norm": 1.0}


def build_data() -> list[dict[str, np.ndarray]]:
    """Rows of different lengths, whose targets are not always the tokens that follow."""
    draw, data = np.random.default_rng(0), []
    for number in range(7):
        count = int(draw.integers(1, 12))
        tokens = draw.integers(3, VOCABULARY, count + 1)
        targets = tokens[1:].copy()
        if number % 2:
            targets[: count // 2] = 0
        data.append(
            {
                "tokens": tokens[:-1],
                "targets": targets.astype(np.int32),
                "weights": draw.normal(size=count).astype(np.float32),
                "advantages": draw.normal(size=count).astype(np.float32),
                "logprobs": draw.uniform(-6.2, -4.8, count).astype(np.float32),
            }
        )
    return data


def build_row(datum: dict[str, np.ndarray]) -> TrainRow:
    count = len(datum["tokens"])
    zeros = np.zeros(count + 1, np.float32)
    return TrainRow(
        token_ids=np.append(datum["tokens"], datum["targets"][-1]).astype(np.int32),
        loss_mask=np.arange(count + 1) > 0,
        rollout_logprobs=zeros,
        advantages=zeros,
        versions=np.zeros(count + 1, np.int32),
    )


class SlotScenarios(Scenarios):
    def run(self) -> None:
        policy = self.policy(PLAIN, lora={"rank": MAX_RANK, "alpha": MAX_RANK, "publish": "adapter"})
        assert policy.adapters is not None
        actor: Any = SimpleNamespace(policy=policy, device=policy.device, _transport=FileTransport(policy, "", 1))
        slot.create(actor, RANK, 1)
        self.write("created", adapters=policy.adapters.gather())
        for name, shard in policy.adapters._shards.items():  # the gradient of A is 0 where B is
            if ".lora_B." in name:
                value = initial_adapter(name, tuple(shard.shape))
                value[:, RANK:] = 0
                shard.data.copy_(distribute_tensor(value, shard.device_mesh, shard.placements))
        self.write("start", adapters=policy.adapters.gather())
        for loss in LOSSES:
            self.train(actor, loss)
        slot.update(actor, ADAM)
        checkpoint, folder = self.folder / f"saved-{self.num_ranks}", self.folder / f"adapter-{self.num_ranks}"
        checkpoints.save_checkpoint(policy, checkpoint)
        slot.write_adapter(actor, folder, RANK)
        saved = policy.adapters.gather()
        published = slot._read_adapter(policy, folder)
        assert slot.publish(actor, 1, 1, self.folder / "gone", "g", 0) is None, "weights that are gone end the ranks"
        scored, _ = self.run_batch(actor, "cross_entropy", backward=False)
        self.write("saved", adapters=saved, published=published, scaled=policy.adapters.scale(saved), scored=scored)
        self.run_batch(actor, "cross_entropy", backward=True)
        changed, _ = slot.update(actor, ADAM)
        slot.create(actor, 2, 7)
        slot.load(actor, checkpoint, RANK, True)
        loaded = policy.adapters.gather()
        steps = [int(state["step"]) for state in policy.optimizer.state.values()]
        self.run_batch(actor, "cross_entropy", backward=True)
        again, num_updates = slot.update(actor, ADAM)
        slot.load(actor, checkpoint, RANK, False)
        without = [float(state["exp_avg"].full_tensor().abs().sum()) for state in policy.optimizer.state.values()]
        outcome = {"loaded": loaded, "steps": steps, "norms": (changed, again), "num_updates": num_updates}
        self.write("loaded", **outcome, only=policy.adapters.gather(), without=without)
        self.write("alone", **{name: self.play(actor, [name]) for name in MODELS})
        self.write("together", **self.play(actor, list(MODELS)))

    def play(self, actor: Any, names: list[str]) -> Any:
        """Return the adapters after three updates, whose gradients are of two batches each, side by side."""
        held, ended = "", dict[str, Any]()

        def hold(name: str) -> None:
            nonlocal held
            if held != name:
                slot.hold(actor, held, name, names)
            held = name

        for name in names:
            hold(name)
            slot.create(actor, *MODELS[name])
        for _ in range(3):
            for loss in ("ppo", "cross_entropy"):
                for name in names:
                    hold(name)
                    self.run_batch(actor, loss, backward=True)
            for name in names:
                hold(name)
                slot.update(actor, ADAM)
        for name in names:
            hold(name)
            scale = actor.policy.adapters._scale
            ended[name] = (actor.policy.adapters.gather(), actor.policy.num_updates, scale)
        return ended if len(names) > 1 else ended[names[0]]

    def train(self, actor: Any, loss: str) -> None:
        """Write the gradient of one batch, and drop it."""
        found, total = self.run_batch(actor, loss, backward=True)
        gradients = {name: shard.grad.full_tensor().clone() for name, shard in actor.policy.adapters._shards.items()}
        actor.policy.optimizer.zero_grad()
        scored, again = self.run_batch(actor, loss, backward=False)
        assert abs(again - total) < 1e-4
        self.write(loss, gradients=gradients, found=found, scored=scored, total=total)

    def run_batch(self, actor: Any, loss: str, *, backward: bool) -> tuple[dict[int, Any], float]:
        """Return the log-probs of this rank's rows, and the loss of all ranks."""
        names = {"targets", "weights"} if loss == "cross_entropy" else {"targets", "advantages", "logprobs"}
        data = build_data()
        parts = divide_rows(
            [build_row(datum) for datum in data],
            num_ranks=self.num_ranks,
            micro_batch_tokens=16,
            layout=actor.policy.layout,
        )
        part = parts[self.rank]
        facts = {index: {name: data[index][name] for name in names} for index in part.indices.tolist()}
        found, own = slot.forward_backward(actor, (part, facts), loss, {}, backward)
        total = torch.tensor(own, dtype=torch.float64)
        torch.distributed.all_reduce(total)
        return {index: each.logprobs for index, each in found.items()}, total.item()


def main(folder: Path) -> None:
    run_on_ranks(folder, build_inputs, SlotScenarios)
