"""`make bench-service`: does a training service with many clients sample as fast as with one?

Each client runs a loop of its own with an adapter of its own: samplers of its new weights, `--prompts` prompts with
`--samples` answers each, importance_sampling on these, and an update. In each round one client runs alone for
`--steps`, then `--clients` at once for one step each. Figures are samples/s of all clients, and their ratio, as medians
over the rounds with ranges. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tinker
from tinker import types

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".models/smollm2-135m-instruct"
MAX_TOKENS = 32


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[tuple[tinker.ServiceClient, str]]:
    """Yield a client of a service that runs meanwhile, and the name of its model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        Path(sys.executable).with_name("rljob"),
        "serve",
        model,
        "--port",
        str(port),
        "--dir",
        folder,
        "--gpus",
        "0",
    ]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        while not (found := re.search(r"TINKER_API_KEY=(\S+)", log.read_text())):
            if process.poll() is not None:
                sys.exit(log.read_text())
            time.sleep(0.2)
        address = {"base_url": f"http://127.0.0.1:{port}", "api_key": found[1]}
        capabilities = tinker.RestClient(**address).get_server_capabilities().result()
        yield tinker.ServiceClient(**address), capabilities.supported_models[0].model_name
    finally:
        process.terminate()
        process.wait()


class Loop:
    """One client's."""

    def __init__(self, service: tinker.ServiceClient, base: str) -> None:
        self.training: Any = service.create_lora_training_client(base_model=base, rank=16).result()
        tokenizer = self.training.get_tokenizer()
        self.prompts = [tokenizer.encode(f"Question: {a} + {a * 7 % 11} = ?\nAnswer:") for a in range(10, 100)]

    def step(self, num_prompts: int, num_samples: int) -> int:
        """Return the number of samples."""
        sampler = self.training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
        prompts = self.prompts[:num_prompts]
        asked = [sampler.sample(types.ModelInput.from_ints(prompt), num_samples, params) for prompt in prompts]
        data = []
        for prompt, answer in zip(prompts, asked, strict=True):
            for index, each in enumerate(answer.result().sequences):
                padding, advantage = [0.0] * (len(prompt) - 1), 1.0 if index % 2 else -1.0
                inputs: dict[str, Any] = {
                    "target_tokens": prompt[1:] + each.tokens,
                    "logprobs": padding + each.logprobs,
                    "advantages": padding + [advantage] * len(each.tokens),
                }
                model_input = types.ModelInput.from_ints(prompt + each.tokens[:-1])
                data.append(types.Datum(model_input=model_input, loss_fn_inputs=inputs))
        forward = self.training.forward_backward(data, "importance_sampling")
        self.training.optim_step(types.AdamParams(learning_rate=1e-5)).result()
        forward.result()
        return len(data)


def measure(loops: list[Loop], steps: int, num_prompts: int, num_samples: int) -> float:
    """Return samples/s of all loops together."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(loops)) as pool:
        found = pool.map(lambda loop: sum(loop.step(num_prompts, num_samples) for _ in range(steps)), loops)
        total = sum(found)
    return total / (time.perf_counter() - begin)


def describe(values: list[float]) -> dict[str, float]:
    return {name: round(of(values), 2) for name, of in (("median", statistics.median), ("min", min), ("max", max))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder,
        serving(options.model, Path(folder)) as (service, base),
    ):
        loops = [Loop(service, base) for _ in range(options.clients)]
        measure(loops, 1, 1, options.samples)  # what is started on demand
        alone, together = [], []
        for number in range(options.rounds):
            alone.append(measure(loops[:1], options.steps, options.prompts, options.samples))
            together.append(measure(loops, 1, options.prompts, options.samples))
            told = f"round {number}: alone {alone[-1]:.2f}, {options.clients} clients {together[-1]:.2f} samples/s"
            print(told, flush=True)
    ratios = [many / one for many, one in zip(together, alone, strict=True)]
    found = {"alone": describe(alone), "together": describe(together), "ratio": describe(ratios)}
    print(json.dumps({"clients": options.clients, **found}))


if __name__ == "__main__":
    main()
