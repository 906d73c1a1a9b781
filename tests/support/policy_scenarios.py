"""Program of test_policy: `main(FOLDER)` runs each scenario with one FSDP2 rank and with two.

Writes FOLDER/NAME-RANKS.pt (parameters, gradients, metrics) for the test. All scenarios share one
start of the processes, since importing torch takes most of the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401 - before the fork

from rljob_api.manifest.algorithm import Algorithm, Optimizer
from rljob_api.manifest.job import RLJob
from rljob_inputs.models.defaults import resolve_job
from rljob_trainer.episodes.types import NOT_SAMPLED, TOP, TrainRow, UpdateMetrics, UpdateVersions
from rljob_trainer.policy import checkpoints, layout, sharding
from rljob_trainer.policy.policy import Policy
from rljob_trainer.policy.sharding import ShardingMode
from rljob_trainer.ranks.results import UpdateCounts, scatter_facts, split_facts, summarize_update
from rljob_trainer.run_folder.client import EXPORT_PARTIAL, RemoteFolder
from tests.support.micro_batches import plan_micro_batches
from tests.support.rank_programs import run_on_ranks

VOCABULARY = 256
HEAD_TOKEN = "secret"
OPTIMIZER = Optimizer(learning_rate=1e-3, max_grad_norm=1.0)
PLAIN = Algorithm(optimizer=OPTIMIZER)
EVERYTHING = Algorithm.model_validate(
    {
        "loss": {"clip_high": 0.28},
        "kl": {"coefficient": 0.1},
        "entropy_coefficient": 0.01,
        "correction": {"cap": 1.5},
        "optimizer": OPTIMIZER,
    }
)


TYPES = ("drGrpo", "dapo", "rloo", "reinforcePlusPlus", "reinforcePlusPlusBaseline", "gspo", "cispo")
"""Algorithms besides grpo, and ppo, whose policy loss is grpo's."""
CORRECTED = {"correction": {"level": "sequence", "cap": 1.5, "rejection": {"cap": 1.2}}}
OTHERS = {kind: {"type": kind} for kind in TYPES} | {"corrected": CORRECTED}
"""Settings of the algorithm by the name of the scenario."""
FIRST = UpdateVersions(proximal=3, current=3, end=4)
"""Versions of the first mini-batch of a step: the proximal policy is the current one."""
LATER = UpdateVersions(proximal=3, current=3.5, end=4)
"""Versions of the second of two mini-batches: the proximal policy is between the rollout's and the current one."""


NO_SIGNAL = (0, 4, 5, 11)
WARM = {"warmStart": {"steps": 2, "learningRate": 5e-3}}
TEACHER = {"name": "t", "weight": 0.5, "teacher": {"hint": "x", "topK": 5}, "use": "training"}
WITH_CRITIC = Algorithm.model_validate({"type": "ppo", "optimizer": OPTIMIZER})


def build_rows(seed: int = 0, *, level: str = "token") -> list[TrainRow]:
    """3 prompts x 4 completions of different lengths, sampled by the weights of versions 2 and 3."""
    draw = random.Random(seed)
    rows = []
    for _ in range(3):
        prompt = [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(2, 9))]
        for sample in range(4):
            count = draw.randrange(1, 10)
            completion = [draw.randrange(3, VOCABULARY) for _ in range(count)]
            rows.append(
                build_row(
                    prompt,
                    completion,
                    logprobs=[draw.uniform(-6.5, -4.5) for _ in completion],
                    advantages=[draw.gauss(0, 4)] * count,
                    versions=sorted(draw.choice((2, 3)) for _ in completion),
                    weight=1.0 if level == "token" else 1 / count,
                    episode=sample,
                )
            )
    return rows


def build_row(
    prompt: list[int],
    completion: list[int],
    *,
    logprobs: list[float],
    advantages: list[float],
    versions: list[int],
    weight: float = 1.0,
    episode: int = 0,
) -> TrainRow:
    none = len(prompt)
    return TrainRow(
        token_ids=np.array(prompt + completion, np.int64),
        loss_mask=np.array([False] * none + [True] * len(completion)),
        rollout_logprobs=np.array([0.0] * none + logprobs, np.float32),
        advantages=np.array([0.0] * none + advantages, np.float32),
        versions=np.array([NOT_SAMPLED] * none + versions, np.int32),
        weight=weight,
        episode=episode,
    )


def given_rows() -> list[TrainRow]:
    """The same tokens as given conversations, which no rollout sampled."""
    return [
        dataclasses.replace(
            row, rollout_logprobs=np.zeros_like(row.rollout_logprobs), advantages=row.loss_mask.astype(np.float32)
        )
        for row in build_rows()
    ]


def denominator(rows: list[TrainRow], level: str = "token") -> float:
    counts = [int(row.loss_mask.sum()) for row in rows]
    return sum(counts) if level == "token" else sum(count > 0 for count in counts)


def with_invalid(rows: list[TrainRow]) -> list[TrainRow]:
    """Add masked rows with extreme contents."""
    invalid = [
        dataclasses.replace(row, advantages=row.advantages + 1e9, token_ids=row.token_ids[::-1])
        for row in all_invalid(rows[::3])
    ]
    return [*invalid, *rows, *invalid]


def all_invalid(rows: list[TrainRow]) -> list[TrainRow]:
    return [dataclasses.replace(row, loss_mask=np.zeros(len(row.token_ids), np.bool_)) for row in rows]


def without_advantages(rows: list[TrainRow], chosen: Iterable[int]) -> list[TrainRow]:
    return [
        dataclasses.replace(row, advantages=row.advantages * 0) if i in set(chosen) else row
        for i, row in enumerate(rows)
    ]


def without_weights(rows: list[TrainRow]) -> list[TrainRow]:
    return [dataclasses.replace(row, weight=0.0) for row in rows]


def with_reference(rows: list[TrainRow]) -> list[TrainRow]:
    return [dataclasses.replace(row, reference_logprobs=row.rollout_logprobs - 0.5) for row in rows]


def with_top(rows: list[TrainRow]) -> list[TrainRow]:
    """Rows with the 5 likeliest tokens of TEACHER, and every third one without an advantage."""
    draw = np.random.default_rng(0)
    found = []
    for i, row in enumerate(rows):
        shape = (int(row.loss_mask.sum()), 1, 5)
        top = np.zeros(shape, TOP)
        top["token"] = draw.permuted(np.tile(np.arange(VOCABULARY), (*shape[:2], 1)), axis=2)[..., :5]
        top["logprob"] = np.log(draw.dirichlet([1.0] * 6, shape[:2])[..., :5])
        found.append(dataclasses.replace(row, top=top, advantages=row.advantages * (i % 3 > 0)))
    return found


def at_temperatures(rows: list[TrainRow]) -> list[TrainRow]:
    """Rows of before and after a change of rollout.sampling.temperature."""
    return [dataclasses.replace(row, temperature=0.7 if i % 3 else 1.2) for i, row in enumerate(rows)]


def build_model(folder: Path) -> None:
    from transformers import Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def build_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2").save_pretrained(folder)


class Scenarios:
    """All scenarios on one rank."""

    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        self.rank, self.num_ranks, self.folder = rank, num_ranks, folder
        self.counts = UpdateCounts()

    def run(self) -> None:
        rows = at_temperatures(build_rows(level="sequence"))
        everything: dict[str, Any] = {"rows": rows, "versions": LATER, "level": "sequence"}
        self.train("plain", PLAIN)
        self.train("accumulated", PLAIN, micro_batch_tokens=16)
        self.train("reduced", PLAIN, micro_batch_tokens=16, mode=ShardingMode(keep_gathered=False, reduce_once=False))
        self.train("unshared", PLAIN, share_prompts=False)
        self.train("masked", PLAIN, rows=with_invalid(build_rows()))
        self.train("recomputed", PLAIN, gradient_checkpointing="full")
        self.train("half", PLAIN, dtype="float16")
        self.train("half-fp32-head", PLAIN, dtype="float16", head_dtype="float32")
        self.train("split", PLAIN, calls=4)
        self.train("split-again", PLAIN, calls=4)
        self.train("without-signal", PLAIN, rows=without_advantages(build_rows(), NO_SIGNAL))
        self.train("everything", EVERYTHING, **everything)
        self.train("everything-accumulated", EVERYTHING, micro_batch_tokens=24, **everything)
        self.train("everything-split", EVERYTHING, calls=5, **everything)
        self.train("given-reference", EVERYTHING, rows=at_temperatures(with_reference(build_rows())), versions=LATER)
        self.train("taught", PLAIN, rows=with_top(build_rows()), micro_batch_tokens=24, rewards=[TEACHER])
        for name, settings in OTHERS.items() if self.num_ranks == 2 else ():
            algorithm = Algorithm.model_validate({**settings, "optimizer": OPTIMIZER})
            self.train(name, algorithm, versions=LATER, level="sequence", calls=3, micro_batch_tokens=24, updates=1)
        self.train("nothing", PLAIN, rows=all_invalid(build_rows()))
        self.train("warm", EVERYTHING, rows=given_rows(), calls=2, schedule=WARM)
        self.train("warm-critic", WITH_CRITIC, rows=given_rows(), updates=1, schedule=WARM)
        self.skip()
        self.rest()
        self.inspect()
        self.publish()
        self.save()

    def policy(
        self, algorithm: Algorithm, schedule: dict[str, Any] | None = None, rewards: Iterable[Any] = (), **trainer: Any
    ) -> Policy:
        spec = {
            "model": {"source": "/m"},
            "data": {"train": {"source": "/t"}, **({"warmStart": {"source": "/w"}} if schedule else {})},
            "rewards": [{"name": "r", "function": {"inline": "x"}}, *rewards],
            "schedule": {"steps": 10, **(schedule or {})},
            "algorithm": algorithm,
            "rollout": {"maxModelLen": 64, "sampling": {"maxTokens": 16}},
            "trainer": {"dtype": "float32", **trainer},
        }
        job = resolve_job(RLJob.model_validate({"metadata": {"name": "t"}, "spec": spec}), None)
        return Policy(job, str(self.folder / "model"), torch.device("cpu"))

    def accumulate(
        self, policy: Policy, rows: list[TrainRow], versions: UpdateVersions = FIRST, limit: int = 4096,
        share: bool = True,
    ) -> None:  # fmt: skip
        plans = plan_micro_batches(
            rows,
            num_ranks=self.num_ranks,
            micro_batch_tokens=limit,
            layout=policy.layout if share else layout.PLAIN,
            without_advantage=policy.algorithm.kl.coefficient > 0,
            versions=versions,
        )
        if plans[0]:
            policy.accumulate(plans[self.rank])
        self.counts.num_tokens += sum(int(row.loss_mask.sum()) for row in rows)

    def apply(self, policy: Policy, denominator: float) -> UpdateMetrics:
        counts, self.counts = self.counts, UpdateCounts()
        return summarize_update(policy.apply(denominator), counts, denominator)

    def update(self, policy: Policy, rows: list[TrainRow]) -> UpdateMetrics:
        self.accumulate(policy, rows)
        return self.apply(policy, denominator(rows))

    def train(
        self,
        name: str,
        algorithm: Algorithm,
        *,
        rows: list[TrainRow] | None = None,
        versions: UpdateVersions = FIRST,
        level: str = "token",
        calls: int = 1,
        updates: int = 2,
        micro_batch_tokens: int = 4096,
        share_prompts: bool = True,
        mode: ShardingMode | None = None,
        **settings: Any,
    ) -> None:
        """Run updates, each of so many calls of accumulate."""
        rows = rows or build_rows(level=level)
        with mock.patch.object(sharding, "choose_mode", return_value=mode) if mode else contextlib.nullcontext():
            policy = self.policy(algorithm, **settings)
        gradients, held = capture_gradients(policy), count_unsharded_gradients(policy)
        metrics = []
        for _ in range(updates):
            for start in range(calls):
                self.accumulate(policy, rows[start::calls], versions, micro_batch_tokens, share_prompts)
            metrics.append(self.apply(policy, denominator(rows, level)))
        self.write(
            name, gradients=next(iter(gradients), {}), metrics=metrics, held=held, parameters=policy.gather_weights()
        )

    def skip(self) -> None:
        """Write the weights before and after an update whose gradient is not finite, and after the next one."""
        policy, rows = self.policy(PLAIN), build_rows()
        broken = dataclasses.replace(rows[5], advantages=np.where(rows[5].loss_mask, np.nan, 0).astype(np.float32))
        before = clone(policy.gather_weights())
        metrics = self.update(policy, [*rows[:5], broken, *rows[6:]])
        after = clone(policy.gather_weights())
        again = self.update(policy, rows)
        self.write("skipped", metrics=metrics, before=before, after=after, next=again, num_updates=policy.num_updates)

    def rest(self) -> None:
        """Write the weights after an update with gradients of zero: one whose rows the plan leaves out, and one whose
        rows run with a weight of 0."""
        parameters = []
        for rows in (without_advantages(build_rows(), range(12)), without_weights(build_rows())):
            policy = self.policy(PLAIN)
            self.update(policy, build_rows())
            self.accumulate(policy, rows)
            self.apply(policy, denominator(rows))
            parameters.append(clone(policy.gather_weights()))
        self.write("rest", without_forward=parameters[0], with_zeros=parameters[1])

    def inspect(self) -> None:
        """Write the reference model's log-probs, and before any update the policy's, which are the same."""
        policy, rows = self.policy(EVERYTHING), build_rows()
        assert policy.reference is not None
        plans = plan_micro_batches(rows, num_ranks=self.num_ranks, micro_batch_tokens=32)
        answers: list[Any] = [None] * self.num_ranks
        batches = plans[self.rank]
        dist.all_gather_object(answers, split_facts(batches, policy.score(batches)))
        scored = scatter_facts(rows, answers)
        dist.all_gather_object(answers, split_facts(batches, policy.inspect(batches)))
        self.accumulate(policy, rows)
        is_sharded = all(isinstance(parameter, DTensor) for parameter in policy.reference.parameters())
        self.write("inspected", facts=scatter_facts(rows, answers), scored=scored, is_sharded=is_sharded)

    def publish(self) -> None:
        """Write the weights that are published in bf16."""
        half = self.policy(PLAIN, dtype="bfloat16")
        before = half.stream_published()
        initial = dict(before.tensors)
        self.update(half, build_rows())
        after = half.stream_published()
        self.write("published", weights=half.gather_weights(), initial=initial, described=before.described,
                   streamed=dict(after.tensors), has_plain_matrices=after.has_plain_matrices)  # fmt: skip

    def save(self) -> None:
        """Save a checkpoint and an export, each in a folder and on the head. test_checkpoints resumes from them."""
        policy = self.policy(EVERYTHING)
        self.update(policy, build_rows(1))
        checkpoints.save_checkpoint(policy, self.folder / f"checkpoint-{self.num_ranks}")
        checkpoints.save_checkpoint(policy, self.on_head("checkpoints/step-000001"))
        self.write("saved", weights=policy.gather_weights())
        for export in (self.folder / f"export-{self.num_ranks}", self.on_head(EXPORT_PARTIAL)):
            checkpoints.export_model(policy, export, str(self.folder / "model"))

    def on_head(self, path: str) -> RemoteFolder:
        """Return a folder of a run that no rank sees. For each number of ranks, test_policy serves another run."""
        return RemoteFolder((self.folder / f"url-{self.num_ranks}").read_text(), path, HEAD_TOKEN)

    def write(self, name: str, **contents: Any) -> None:
        if self.rank == 0:
            torch.save(contents, self.folder / f"{name}-{self.num_ranks}.pt")


def clone(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy weights that are valid until the next update."""
    return {name: tensor.clone() for name, tensor in weights.items()}


def capture_gradients(policy: Policy) -> list[dict[str, torch.Tensor]]:
    """Capture the clipped gradients of each of the optimizer's steps, by Hugging Face name."""
    gradients: list[dict[str, torch.Tensor]] = []
    step = policy.optimizer.step

    def capture() -> None:
        named = [(name, p.grad) for name, p in policy.model.named_parameters() if p.grad is not None]
        gradients.append({name.removeprefix("network."): gradient.full_tensor().clone() for name, gradient in named})
        step()

    policy.optimizer.step = capture  # type: ignore[method-assign]
    return gradients


def count_unsharded_gradients(policy: Policy) -> list[int]:
    """Count the gradients that the rank holds as a whole before each micro-batch."""
    counts: list[int] = []
    loss = policy._loss

    def count(*arguments: Any) -> torch.Tensor:
        units = [module for module in policy.model.modules() if isinstance(module, FSDPModule)]
        parameters = [
            p for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups for p in group.fsdp_params
        ]
        counts.append(sum(is_held_whole(parameter) for parameter in parameters))
        return loss(*arguments)

    policy._loss = count  # type: ignore[method-assign]
    return counts


def is_held_whole(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def build_inputs(_: int, folder: Path) -> None:
    build_model(folder / "model")
    build_tokenizer(folder / "model")


def main(folder: Path) -> None:
    run_on_ranks(folder, build_inputs, Scenarios)
