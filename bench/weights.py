"""`make bench-weights`: how fast weights get from a publisher to receivers on this machine, over the time of one copy.

The publisher has random bf16 parameters in the shapes of a Qwen2 model of the wanted size. Each receiver is a process
with the puller of a rollout, and without vLLM: it loads into parameters in its memory, and digests them as an engine
does. The first versions are left out: they allocate. A figure is the median over the other versions. Each is compared
with the copies of the same bytes, with all threads, that follow it: a machine's speed changes within a run.

    publish   gather, write, digest and hash, until the head could announce the version
    sync      from the announcement until the last receiver serves the version
    both      publish and sync
    transfer  of the slowest receiver: until it may load. Not part of its pause
    pause     of the slowest receiver: load and digest
    load      of the slowest receiver
    digest    of all parameters, outside of the caches, with all threads of the publisher

`http` receivers download; `local` ones see the publisher's file, as under `rljob run`. With --learning-rate, a version
is an update of the one before, by that rate in fp32, as AdamW moves a parameter at most; `bytes_over_file` is the
share that came. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rljob_api.wire.weights import PullReport, RolloutWeights, WeightManifest
from rljob_trainer.rollout.puller import ReplicaState, WeightPuller
from rljob_trainer.rollout.weight_transfer import WeightClient
from rljob_trainer.weights.checksum import Digest, choose_unit, digest_tensors
from rljob_trainer.weights.mapped import MappedFiles, TensorSpec
from rljob_trainer.weights.store import WeightStore

TRAINER = "127.10.211.2"
TOKEN = "bench"
GIGABYTE = 10**9
NUM_FIRST = 3
"""Versions that are left out."""
HIDDEN_BY_GIGABYTES = ((0.15, 576), (0.6, 896), (1.5, 1152), (4.0, 1536))
"""The hidden size of models up to this size."""
VOCABULARY = 32_000
NUM_RANDOM = 1 << 22
SCALE = 0.02
"""Standard deviation of parameters that are updated."""
NUM_COPIES = 3
"""After each version."""
PARTS = ("publish", "sync", "both", "transfer", "pause", "load", "digest")


def build_shapes(num_bytes: float) -> dict[str, tuple[int, ...]]:
    """Return the parameters of a Qwen2-like model with about this many bytes in bf16."""
    hidden = next(h for limit, h in HIDDEN_BY_GIGABYTES if num_bytes <= limit * GIGABYTE)
    mlp, kv = hidden * 11 // 4 // 64 * 64, hidden // 4 // 64 * 64
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (hidden, hidden), "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (kv, hidden), "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, hidden), "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (mlp, hidden), "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    per_layer = sum(map(_count, layer.values()))
    num_layers = max(1, round((num_bytes / 2 - VOCABULARY * hidden) / per_layer))
    for i in range(num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,)}


def build_parameters(num_bytes: float) -> dict[str, Tensor]:
    torch.manual_seed(0)
    values, parameters = torch.randn(NUM_RANDOM).bfloat16(), {}
    for i, (name, shape) in enumerate(build_shapes(num_bytes).items()):
        repeats = -(-_count(shape) // NUM_RANDOM)
        parameters[name] = values.roll(i * 997).repeat(repeats)[: _count(shape)].view(shape).clone()
    return parameters


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


class Client(WeightClient):
    """Gets manifests from standard input."""

    def __init__(self, folder: Path) -> None:
        super().__init__("", TOKEN, lambda num_bytes: folder)

    async def fetch_manifest(self, after: str, report: PullReport | None) -> WeightManifest | None:
        return WeightManifest.model_validate_json(await asyncio.to_thread(sys.stdin.readline))


class Receiver:
    """A receiver's process, as the publisher sees it."""

    def __init__(self, num_bytes: float, num_threads: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
        command = [sys.executable, __file__, "--receive", str(num_bytes)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def announce(self, manifest: WeightManifest) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(manifest.model_dump_json() + "\n")
        self._process.stdin.flush()

    def next(self) -> dict[str, Any]:
        """Return its next line: what it did for one version."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a receiver has ended")
        return json.loads(line)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


class Parameters:
    """What a receiver loads into, in place of vLLM's engine."""

    def __init__(self, num_bytes: float) -> None:
        shapes = build_shapes(num_bytes)
        self.exclusive = asyncio.Lock()
        self._files = MappedFiles()
        self._parameters = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}

    async def warm_up(self) -> None:
        pass

    async def load(
        self, path: Path, manifest: WeightManifest, record_draining: Callable[[bool], None]
    ) -> RolloutWeights:
        return await asyncio.to_thread(self._load, path, manifest)

    def _load(self, path: Path, manifest: WeightManifest) -> RolloutWeights:
        begin = time.perf_counter()
        load_seconds, digest = 0.0, Digest()
        for name, tensor in self._files.open(path).tensors():
            started_at, parameter = time.perf_counter(), self._parameters[name]
            parameter.copy_(tensor)
            load_seconds += time.perf_counter() - started_at
            digest += digest_tensors([parameter], manifest.digest_unit)  # while it is in the cache
        checksum = str(digest)
        if checksum != manifest.checksum:
            raise RuntimeError(f"digest {checksum}, published {manifest.checksum}")
        return RolloutWeights(
            generation=manifest.generation,
            version=manifest.version,
            checksum=checksum,
            load_seconds=load_seconds,
            pause_seconds=time.perf_counter() - begin,
        )


async def receive(num_bytes: float) -> None:
    """Follow the head until the process is ended, and print one line for each version."""
    state = ReplicaState()
    with tempfile.TemporaryDirectory(prefix="rljob-bench-", dir="/dev/shm") as folder:
        puller = asyncio.create_task(WeightPuller(state, Client(Path(folder)), Parameters(num_bytes), "bench").run())
        print(json.dumps({"ready": True}), flush=True)
        served = state.serving
        while not puller.done():
            await state.wait_until(lambda key=served.key: state.serving.key != key or bool(state.error))
            if state.error:
                print(state.error, file=sys.stderr, flush=True)
                os._exit(1)  # not an exception: a thread still reads standard input, and the exit would wait for it
            served = state.serving
            line = {
                "version": served.version,
                "served_at": time.monotonic(),
                "transfer": served.transfer_seconds,
                "pause": served.pause_seconds,
                "load": served.load_seconds,
                "bytes": served.transfer_bytes,
            }
            print(json.dumps(line), flush=True)


def measure(
    gigabytes: float, num_receivers: int, num_versions: int, learning_rate: float, *, is_local: bool
) -> dict[str, Any]:
    parameters = build_parameters(gigabytes * GIGABYTE)
    masters = {name: tensor.float().mul_(SCALE) for name, tensor in parameters.items()} if learning_rate else {}
    copies = {name: torch.empty_like(tensor).fill_(1) for name, tensor in parameters.items()}
    unit = choose_unit(parameters.values(), num_shards=1)
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_receivers)
    rounds: list[dict[str, float]] = []
    copy_seconds: list[float] = []
    """After each version, the median."""
    with ExitStack() as stack:
        store = WeightStore(TRAINER, TOKEN)
        stack.callback(store.close)
        receivers = []
        for _ in range(num_receivers):
            receivers.append(Receiver(gigabytes * GIGABYTE, num_threads))
            stack.callback(receivers[-1].close)
        for receiver in receivers:
            receiver.next()
        for version in range(NUM_FIRST + num_versions):
            for name, master in masters.items():
                parameters[name].copy_(master.add_(torch.randn_like(master).sign_(), alpha=learning_rate))
            begin = time.perf_counter()
            specs = {name: TensorSpec.of(tensor) for name, tensor in parameters.items()}
            manifest = store.publish_stream(specs, parameters.items(), "bench", version, unit)
            publish_seconds = time.perf_counter() - begin
            announced_at = time.monotonic()
            for receiver in receivers:
                receiver.announce(manifest if is_local else manifest.model_copy(update={"local": None}))
            lines = [receiver.next() for receiver in receivers]
            figures = {part: max(line[part] for line in lines) for part in ("transfer", "pause", "load", "bytes")}
            sync_seconds = max(line["served_at"] for line in lines) - announced_at
            figures |= {"publish": publish_seconds, "sync": sync_seconds, "both": publish_seconds + sync_seconds}
            begin = time.perf_counter()
            digest_tensors(parameters.values(), unit)
            rounds.append(figures | {"digest": time.perf_counter() - begin})
            copy_seconds.append(statistics.median(measure_copy(parameters, copies) for _ in range(NUM_COPIES)))
    first, measured, copied = rounds[0], rounds[NUM_FIRST:], copy_seconds[NUM_FIRST:]
    seconds = {part: statistics.median(figures[part] for figures in measured) for part in measured[0]}
    over_copy = {
        part: statistics.median(figures[part] / copy for figures, copy in zip(measured, copied, strict=True))
        for part in PARTS
    }
    num_bytes = sum(tensor.nbytes for tensor in parameters.values())
    return {
        "gigabytes": round(num_bytes / GIGABYTE, 3),
        "receivers": num_receivers,
        "transfer": "local" if is_local else "http",
        "copy_seconds": round(statistics.median(copied), 4),
        "seconds": {part: round(seconds[part], 4) for part in PARTS},
        "over_copy": {part: round(ratio, 2) for part, ratio in over_copy.items()},
        "bytes_over_file": round(statistics.median(figures["bytes"] for figures in measured) / num_bytes, 4),
        "first_version_seconds": {part: round(first[part], 4) for part in ("publish", "sync")},
    }


def measure_copy(parameters: dict[str, Tensor], copies: dict[str, Tensor]) -> float:
    begin = time.perf_counter()
    for name, tensor in parameters.items():
        copies[name].copy_(tensor)
    return time.perf_counter() - begin


def report(results: Sequence[dict[str, Any]]) -> None:
    table = Table("GB", "receivers", "", "copy, s", *PARTS, title="over one memory copy of the same bytes")
    for result in results:
        ratios = [f"{result['over_copy'][part]:.1f}" for part in PARTS]
        how = (result["gigabytes"], result["receivers"], result["transfer"], result["copy_seconds"])
        table.add_row(*map(str, how), *ratios)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.1, 0.27, 1.0])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1])
    parser.add_argument("--versions", type=int, default=4, help="measured for each line")
    parser.add_argument("--transfer", choices=["local", "http"], nargs="+", default=["local", "http"])
    parser.add_argument("--learning-rate", type=float, default=0.0)
    parser.add_argument("--receive", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        asyncio.run(receive(args.receive))
        return
    results = []
    for gigabytes in args.gigabytes:
        for num_receivers in args.receivers:
            for transfer in args.transfer:
                results.append(
                    measure(gigabytes, num_receivers, args.versions, args.learning_rate, is_local=transfer == "local")
                )
                print(json.dumps(results[-1]), file=sys.stderr)
    report(results)
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
