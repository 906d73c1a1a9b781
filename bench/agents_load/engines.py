"""Real vLLM rollouts with the model's own weights, and the process that is head and trainer for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aiohttp import web

from rljob_api.wire import contract
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.weights.mapped import TensorSpec

HEAD, TRAINER = "127.10.254.1", "127.10.254.2"


@dataclass
class Weights:
    """The process that publishes weights."""

    commands: IO[bytes]
    manifests: IO[bytes]

    def publish(self) -> WeightManifest:
        """Publish the weights as the next version."""
        self.commands.write(b"\n")
        self.commands.flush()
        return WeightManifest.model_validate_json(self.manifests.readline())


@contextlib.contextmanager
def run_engines(model: Path, addresses: Sequence[str], *extra_args: str) -> Iterator[Weights]:
    """Start a rollout at each address, which loads the first version that is published. `extra_args`: of vLLM."""
    job = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"source": str(model)},
            "data": {"train": {"source": "/not/read"}},
            "rewards": [{"name": "none", "function": {"inline": "def compute_score(*_): return 0.0"}}],
            "trainer": {"dtype": "float32"},
            "rollout": {"kvCacheMemory": "1Gi", "extraArgs": list(extra_args)},
        },
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "job.yaml").write_text(json.dumps(job))
        (folder / "hosts").write_text(f"{HEAD} head\n" + "".join(f"{address} rollout\n" for address in addresses))
        os.environ[contract.ENV_HOSTS_FILE] = str(folder / "hosts")
        os.environ[contract.ENV_ROLLOUT_SERVICE] = "rollout"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        weights = stack.enter_context(_run([__file__, str(model)], {}, **pipes))
        for address in addresses:
            environment = {
                contract.ENV_JOB_FILE: str(folder / "job.yaml"),
                contract.ENV_HEAD: "head",
                contract.ENV_POD_IP: address,
                "RLJOB_MODEL": str(model),
                "HF_HUB_OFFLINE": "1",
            }
            log = stack.enter_context((folder / f"{address}.log").open("wb"))
            output = {"stdout": log, "stderr": subprocess.STDOUT}
            stack.enter_context(_run(["-m", "rljob_trainer.rollout"], environment, **output))
        assert weights.stdin is not None
        assert weights.stdout is not None
        try:
            yield Weights(weights.stdin, weights.stdout)
        except BaseException:
            for file in folder.glob("*.log"):
                sys.stderr.write(file.read_text(errors="replace")[-4000:])
            raise


@contextlib.contextmanager
def _run(arguments: Sequence[str], environment: dict[str, str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *arguments], env=os.environ | environment, **options)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


async def _serve_weights(model: Path) -> None:
    """Be the head and the trainer: for each line of the input publish the weights, and print their manifest."""
    import torch
    from transformers import AutoModelForCausalLM

    from rljob_trainer.weights.store import WeightStore

    store = WeightStore(TRAINER, os.environ[contract.ENV_TOKEN])
    # Tied weights once: the engine's digest has them once.
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    specs = {name: TensorSpec.of(tensor) for name, tensor in weights.items()}
    manifests: list[WeightManifest] = []
    changed = asyncio.Event()

    async def get_current(request: web.Request) -> web.Response:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(request.query["timeout"])):
                while not manifests or request.query["after"] == manifests[-1].key:
                    await changed.wait()
                    changed.clear()
                return web.json_response(text=manifests[-1].model_dump_json())
        return web.Response(status=204)

    app = web.Application()
    app.router.add_get(contract.UrlPath.WEIGHTS_CURRENT, get_current)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, HEAD, contract.PORT_DRIVER).start()
    while await asyncio.to_thread(sys.stdin.readline):
        manifests.append(store.publish_stream(specs, weights.items(), "bench", len(manifests), "element"))
        print(manifests[-1].model_dump_json(), flush=True)
        changed.set()


if __name__ == "__main__":
    asyncio.run(_serve_weights(Path(sys.argv[1])))
