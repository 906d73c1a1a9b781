"""How much of what LoRA has trained is in merged weights, and in a published adapter, as a table and one JSON object.

    the quickstart's model, its own answers, random advantages --> UPDATES updates of the trainer's policy
    log-probs of the trained policy, of its weights merged in bf16, of the base with the adapter in bf16

All log-probs are computed in fp32 over the whole vocabulary, so that the weights alone differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rljob_api.manifest.job import RLJob
from rljob_trainer.episodes.types import NOT_SAMPLED, TrainRow, UpdateVersions
from rljob_trainer.policy.layout import RankPlan, build_micro_batches, divide_rows
from rljob_trainer.policy.lora import MergeCost
from rljob_trainer.policy.policy import Policy

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/quickstart"
MODEL = EXAMPLE.parents[1] / ".models/smollm2-135m-instruct"
GROUP, PROMPTS, ANSWER_TOKENS = 4, 4, 24
PUBLISHED = torch.bfloat16


def build_job(rank: int, rate: float) -> RLJob:
    spec = {
        "model": {"source": str(MODEL)},
        "data": {"train": {"source": str(EXAMPLE / "data/train.jsonl")}},
        "rewards": [{"name": "r", "http": {"url": "http://r"}}],
        "algorithm": {"optimizer": {"learningRate": rate}},
        "trainer": {"dtype": "float32", "lora": {"rank": rank}},
    }
    return RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "lora"}, "spec": spec}
    )


def build_rows(network: Any, tokenizer: Any, questions: list[str], seed: int) -> list[TrainRow]:
    """Return rows of answers that the model has sampled, with advantages that sum up to 0 in each group."""
    torch.manual_seed(seed)
    generator, rows = np.random.default_rng(seed), []
    for question in questions:
        prompt = tokenizer(f"Question: {question}\nAnswer:", return_tensors="pt").input_ids  # [1, tokens]
        answers = network.generate(
            prompt, do_sample=True, top_k=0, max_new_tokens=ANSWER_TOKENS, num_return_sequences=GROUP, eos_token_id=None
        )  # [group, tokens]
        with torch.no_grad():
            logprobs = network(answers[:, :-1]).logits.log_softmax(-1)
        chosen = logprobs.gather(2, answers[:, 1:, None])[..., 0].numpy()
        advantages = generator.normal(size=GROUP)
        advantages -= advantages.mean()
        sampled = np.arange(answers.shape[1]) >= prompt.shape[1]
        for ids, logprob, advantage in zip(answers.numpy(), chosen, advantages, strict=True):
            rows.append(
                TrainRow(
                    token_ids=ids,
                    loss_mask=sampled,
                    rollout_logprobs=np.where(sampled, np.concatenate([[0], logprob]), 0).astype(np.float32),
                    advantages=np.where(sampled, advantage, 0).astype(np.float32),
                    versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
                )
            )
    return rows


def update(policy: Policy, rows: list[TrainRow], version: int) -> None:
    batches = _plan(
        rows,
        num_ranks=1,
        micro_batch_tokens=4096,
        layout=policy.layout,
        without_advantage=False,
        versions=UpdateVersions(0, version, version + 1),
    )[0]
    policy.accumulate(batches)
    policy.apply(float(sum(row.loss_mask.sum() for row in rows)))


def merge(
    policy: Policy, base: Mapping[str, Tensor], dtype: torch.dtype, cost: MergeCost
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with the adapters added, as they are published in `dtype`, in fp32."""
    assert policy.adapters is not None
    adapters = policy.adapters.gather()
    adapted = {name.removeprefix("base_model.model.").rpartition(".lora_A.")[0] for name in adapters}
    for name, weight in base.items():
        module, _, leaf = name.rpartition(".")
        given = f"{module}.base_layer.{leaf}" if module in adapted else name
        for _, merged in policy.adapters.merge([(given, weight.to(dtype))], adapters, cost):
            yield name, merged.float()


def add_published_adapter(policy: Policy, base: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that a rollout computes with, if it gets the adapters in PUBLISHED."""
    assert policy.adapters is not None
    adapters = policy.adapters.scale(policy.adapters.gather())
    rounded = {name: tensor.to(PUBLISHED).float() for name, tensor in adapters.items()}
    for name, weight in base.items():
        module = f"base_model.model.{name.rpartition('.')[0]}"
        a, b = (rounded.get(f"{module}.lora_{side}.weight") for side in "AB")
        yield name, weight if a is None or b is None else weight + b @ a


def find_logprobs(network: Any, weights: Mapping[str, Tensor], rows: list[TrainRow]) -> Tensor:
    """Return the log-probs at the sampled tokens.  # [tokens, vocabulary]"""
    network.load_state_dict(weights, strict=False)
    found = []
    with torch.no_grad():
        for row in rows:
            logits = network(torch.tensor(row.token_ids)[None]).logits[0]
            found.append(logits[:-1][torch.tensor(row.loss_mask)[1:]].log_softmax(-1))
    return torch.cat(found)


def divergence(trained: Tensor, other: Tensor) -> float:
    """KL(trained || other), mean over tokens."""
    return (trained.exp() * (trained - other)).sum(-1).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--rank", type=int, default=32)
    arguments = parser.parse_args()
    disable_progress_bar()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    network: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    base = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    lines = (EXAMPLE / "data/train.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    policy = Policy(build_job(arguments.rank, arguments.learning_rate), str(MODEL), torch.device("cpu"))
    rows: list[TrainRow] = []
    for number in range(arguments.updates):
        chosen = questions[number * PROMPTS : (number + 1) * PROMPTS]
        rows = build_rows(network, tokenizer, chosen, seed=number)
        update(policy, rows, number)
        print(f"update {number + 1} of {arguments.updates}", file=sys.stderr, flush=True)

    cost = MergeCost()
    merged = dict(merge(policy, base, PUBLISHED, cost))
    weights = {
        "base": base,
        "trained": dict(merge(policy, base, torch.float32, MergeCost())),
        "merged": merged,
        "adapter": dict(add_published_adapter(policy, base)),
    }
    logprobs = {name: find_logprobs(network, each, rows) for name, each in weights.items()}
    learned = divergence(logprobs["trained"], logprobs["base"])
    lost = {name: divergence(logprobs["trained"], logprobs[name]) / learned for name in ("merged", "adapter")}
    changed = sum(int((merged[name] != base[name]).sum()) for name in base) / sum(
        each.numel() for each in base.values()
    )
    table = Table("published", "KL(trained || served) / KL(trained || base)", title=f"{arguments.updates} updates")
    for name, share in lost.items():
        table.add_row(name, f"{share:.4f}")
    Console(width=120).print(table)
    result = {
        "updates": arguments.updates,
        "learning_rate": arguments.learning_rate,
        "kl_trained_base": learned,
        **{f"kl_share_{name}": share for name, share in lost.items()},
        "merged_share": cost.share,
        "merged_elements_changed": changed,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()


def _plan(rows: Sequence[TrainRow], **options: Any) -> list[RankPlan]:
    return [build_micro_batches(part) for part in divide_rows(rows, **options)]
