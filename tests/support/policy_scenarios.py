"""Program of test_policy: `python policy_scenarios.py FOLDER` runs each scenario with one FSDP2 rank and with two.

Writes FOLDER/NAME-RANKS.pt (parameters, gradients of the first update, metrics) for the test. All scenarios share one
start of the processes, since importing torch takes most of the time.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401 - before the fork

from rljob_api.manifest.algorithm import Algorithm, Optimizer
from rljob_api.manifest.job import RLJob
from rljob_trainer.episodes.types import TrainSample
from rljob_trainer.policy import checkpoints
from rljob_trainer.policy.micro_batches import plan_micro_batches
from rljob_trainer.policy.policy import Policy

VOCABULARY = 256
OPTIMIZER = Optimizer(learning_rate=1e-3, max_grad_norm=1.0)
PLAIN = Algorithm(optimizer=OPTIMIZER)
EVERYTHING = Algorithm.model_validate(
    {
        "clip_high": 0.28,
        "loss_level": "sequence",
        "kl": {"coefficient": 0.1},
        "entropy_coefficient": 0.01,
        "importance_cap": 1.5,
        "optimizer": OPTIMIZER,
    }
)


def build_samples(seed: int = 0, *, with_old: bool = False) -> list[TrainSample]:
    """3 prompts x 4 completions of different lengths."""
    draw = random.Random(seed)
    samples = []
    for _ in range(3):
        prompt = [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(2, 9))]
        for _ in range(4):
            completion = [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(1, 10))]
            near = [draw.uniform(-6.5, -4.5) for _ in completion]
            zeros = [0.0] * len(prompt)
            samples.append(
                TrainSample(
                    token_ids=prompt + completion,
                    loss_mask=[0] * len(prompt) + [1] * len(completion),
                    rollout_logprobs=zeros + near,
                    advantage=draw.gauss(0, 4),
                    old_logprobs=zeros + [p + draw.uniform(-0.3, 0.3) for p in near] if with_old else None,
                )
            )
    return samples


def with_invalid(samples: list[TrainSample]) -> list[TrainSample]:
    """Add masked samples with extreme contents."""
    invalid = [
        dataclasses.replace(s, loss_mask=[0] * len(s.token_ids), advantage=1e9, token_ids=s.token_ids[::-1])
        for s in samples[::3]
    ]
    return [*invalid, *samples, *invalid]


def all_invalid(samples: list[TrainSample]) -> list[TrainSample]:
    return [dataclasses.replace(sample, loss_mask=[0] * len(sample.token_ids)) for sample in samples]


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

    def run(self) -> None:
        self.train("plain", PLAIN)
        self.train("accumulated", PLAIN, micro_batch_tokens=16)
        self.train("unshared", PLAIN, share_prompts=False)
        self.train("masked", PLAIN, samples=with_invalid(build_samples()))
        self.train("recomputed", PLAIN, gradient_checkpointing=True)
        self.train("everything", EVERYTHING, samples=build_samples(with_old=True), temperature=0.7)
        self.train("everything-accumulated", EVERYTHING, samples=build_samples(with_old=True), temperature=0.7,
                   micro_batch_tokens=24)  # fmt: skip
        self.train("nothing", PLAIN, samples=all_invalid(build_samples()))
        self.measure()
        self.resume()

    def policy(self, algorithm: Algorithm, *, temperature: float = 1.0, **trainer: Any) -> Policy:
        spec = {
            "model": {"source": "/m"},
            "data": {"train": {"source": "/t"}},
            "rewards": [{"name": "r", "function": {"inline": "x"}}],
            "schedule": {"steps": 10},
            "algorithm": algorithm,
            "rollout": {"sampling": {"temperature": temperature}},
            "trainer": {"dtype": "float32", **trainer},
        }
        job = RLJob.model_validate({"metadata": {"name": "t"}, "spec": spec})
        return Policy(job, str(self.folder / "model"), torch.device("cpu"))

    def update(self, policy: Policy, samples: list[TrainSample], limit: int = 4096, share: bool = True) -> Any:
        plans = plan_micro_batches(
            samples,
            num_ranks=self.num_ranks,
            micro_batch_tokens=limit,
            loss_level=policy.algorithm.loss_level,
            share_prompts=share and policy.can_share_prompts,
        )
        return policy.update(plans[self.rank])

    def train(
        self,
        name: str,
        algorithm: Algorithm,
        *,
        samples: list[TrainSample] | None = None,
        micro_batch_tokens: int = 4096,
        share_prompts: bool = True,
        **settings: Any,
    ) -> None:
        """Run two updates."""
        samples = samples or build_samples()
        policy = self.policy(algorithm, **settings)
        gradients = capture_gradients(policy)
        first = self.update(policy, samples, micro_batch_tokens, share_prompts)
        first_gradients = dict(gradients)
        second = self.update(policy, samples, micro_batch_tokens, share_prompts)
        self.write(name, gradients=first_gradients, metrics=[first, second], parameters=policy.gather_weights())

    def measure(self) -> None:
        """Write log-probs, and the weights that are published in bf16."""
        policy = self.policy(PLAIN)
        (plan, *_) = plan_micro_batches(build_samples(), num_ranks=1, micro_batch_tokens=4096)
        values = policy.compute_logprobs(plan.train)
        half = self.policy(PLAIN, dtype="bfloat16")
        self.update(half, build_samples())
        self.write("measured", logprobs=values, batches=plan.train, published=half.gather_weights())

    def resume(self) -> None:
        """Run without and with a resume from a checkpoint; export; resume from a checkpoint of another world size."""
        folder = self.folder / f"checkpoint-{self.num_ranks}"
        policy = self.policy(EVERYTHING)
        self.update(policy, build_samples(1))
        checkpoints.save_checkpoint(policy, folder)
        self.update(policy, build_samples(2))
        self.update(policy, build_samples(3))
        resumed = self.policy(EVERYTHING)
        checkpoints.load_checkpoint(resumed, folder)
        self.update(resumed, build_samples(2))
        self.update(resumed, build_samples(3))
        self.write("resumed", uninterrupted=policy.gather_weights(), resumed=resumed.gather_weights(),
                   counts=(policy.num_updates, resumed.num_updates))  # fmt: skip
        checkpoints.export_model(resumed, self.folder / f"export-{self.num_ranks}", str(self.folder / "model"))
        if self.num_ranks == 2:
            other = self.policy(EVERYTHING)
            checkpoints.load_checkpoint(other, self.folder / "checkpoint-1")
            self.update(other, build_samples(2))
            self.update(other, build_samples(3))
            self.write("other-size", resumed=other.gather_weights())

    def write(self, name: str, **contents: Any) -> None:
        if self.rank == 0:
            torch.save(contents, self.folder / f"{name}-{self.num_ranks}.pt")


def capture_gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """Capture the clipped gradients of the optimizer's next step, by Hugging Face name."""
    gradients: dict[str, torch.Tensor] = {}
    step = policy.optimizer.step

    def capture() -> None:
        for name, parameter in policy.model.named_parameters():
            gradients[name.removeprefix("network.")] = parameter.grad.full_tensor().clone()
        step()

    policy.optimizer.step = capture  # type: ignore[method-assign]
    return gradients


def build_inputs(_: int, folder: Path) -> None:
    build_model(folder / "model")
    build_tokenizer(folder / "model")


def run_rank(rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{num_ranks}", rank=rank, world_size=num_ranks)
    Scenarios(rank, num_ranks, folder).run()
    dist.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    # Fork before torch starts a thread: the imports, which take most of the time, run once.
    torch.multiprocessing.start_processes(build_inputs, (folder,), 1, start_method="fork")
    for num_ranks in (1, 2):
        torch.multiprocessing.start_processes(run_rank, (num_ranks, folder), num_ranks, start_method="fork")


if __name__ == "__main__":
    main()
