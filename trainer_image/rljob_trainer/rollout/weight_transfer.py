"""I/O of the weight puller: the head's manifest, the trainer's file, and vLLM's engine.

A file of the same machine is read in place, others are downloaded. The engine generates during the download, which ends
with a complete, verified file or an error. Only `load` pauses the engine. Invariant: `load` resumes the engine that it
paused, even after an error; but never one whose cache is asleep.

Some weights of an engine come from files, and no pull replaces them: by its settings, or those of the whole model in a
job without a trainer. A sleep must keep them.

With spec.trainer.lora.publish: adapter, vLLM has a slot for each adapter of the published file, and a weight update
replaces the contents of those that have changed: one, which every request uses; or those of a service, of which a
request names one, or none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
from pydantic import ValidationError

from rljob_api.errors import TransientError
from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.roles import Lora, UpdateMode
from rljob_api.wire import contract
from rljob_api.wire.discovery import listening_port, resolve
from rljob_api.wire.driver_status import HungPart
from rljob_api.wire.weights import PullReport, RolloutWeights, WeightManifest, slot_name
from rljob_inputs.models.config import publishes_adapter
from rljob_trainer.rollout.download import Download, SharedDownload
from rljob_trainer.weights.checksum import Digest
from rljob_trainer.weights.mapped import MappedFile, MappedFiles, boot_id, open_scratch_folder

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.lora.request import LoRARequest


_POLL_SECONDS = 30
_REPORT_SECONDS = 5
"""Instead, while there is something to report."""
_HANG_SECONDS = 3
"""For which a replica that ends tries to tell the head why."""
# The head answers within _POLL_SECONDS; the margin allows for a slow head.
_POLL_TIMEOUT = aiohttp.ClientTimeout(total=_POLL_SECONDS + 15, connect=5)

Level = Literal[1, 2]
"""vLLM's levels of sleep. 1: the cache is dropped, and weights move to the host. 2: both are dropped."""
UNVERIFIED = "unverified"
"""Label of tokens from weights of no known version."""
_PAUSES: dict[UpdateMode, tuple[str, bool]] = {
    "keep": ("keep", False),
    "recompute": ("keep", True),
    "finish": ("wait", True),
}
"""vLLM's pause mode, and whether the pause clears the caches: running requests then recompute their keys and values
with the new weights."""


class WeightClient:
    """Gets manifests from the head and files from the trainer, with the job's token."""

    def __init__(
        self,
        head: str,
        token: str,
        open_folder: Callable[[int], Path] = open_scratch_folder,
        shared: SharedDownload | None = None,
    ) -> None:
        """`open_folder`: returns the folder for downloads of this many bytes. Called before the first one. `shared`:
        serves downloads to other replicas."""
        self._shared = shared or SharedDownload()
        self._head, self._token, self._open_folder = head, token, open_folder
        self._folder: Path | None = None
        headers = {"Authorization": f"Bearer {token}"}
        self._session = aiohttp.ClientSession(headers=headers, raise_for_status=True)
        self._local = MappedFiles()
        """The publisher's."""
        self._own: MappedFile | None = None
        """The file for downloads. Its memory is used again, since the first touch of a page costs most."""
        self._own_hash = ""
        """Hash of its content; empty while a download changes it, and after one that failed."""
        self.transfer_bytes = 0
        """That came for the last file; 0 for one that is read in place."""
        self._locked: MappedFile | None = None

    async def close(self) -> None:
        await self._session.close()
        await asyncio.to_thread(self._shared.close)

    async def fetch_manifest(self, after: str, report: PullReport | None) -> WeightManifest | None:
        """Return a manifest other than `after`; None after a timeout. TransientError if the head is unreachable."""
        url = await find_head_url(self._head, contract.UrlPath.WEIGHTS_CURRENT)
        params = {"after": after, "timeout": str(_REPORT_SECONDS if report else _POLL_SECONDS)}
        if report:
            params["report"] = report.model_dump_json()
        if self._shared.address:
            params["peer"] = self._shared.address
        try:
            async with self._session.get(url, params=params, timeout=_POLL_TIMEOUT, allow_redirects=False) as response:
                if response.status == 204:
                    return None
                return WeightManifest.model_validate_json(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValidationError) as error:
            raise TransientError(f"{url}: {type(error).__name__}: {error}") from error

    async def fetch_file(self, manifest: WeightManifest, record_received: Callable[[int], None]) -> Path:
        """Return a file with the announced weights, which does not change until release(): the publisher's own if this
        process sees it, else a verified download. TransientError if there is none."""
        self.release()
        self.transfer_bytes = 0
        path = self._find_local(manifest)
        return path if path is not None else await self._download(manifest, record_received)

    def release(self) -> None:
        """End the use of the last file that was fetched."""
        if self._locked is not None:
            self._locked.unlock()
            self._locked = None

    def _find_local(self, manifest: WeightManifest) -> Path | None:
        """Lock the publisher's file. None if this process does not see it, or it has another version."""
        local = manifest.local
        if local is None or local.boot_id != boot_id():
            return None
        path, identity = Path(local.path), (local.device, local.inode)
        try:
            file = self._local.open(path)
            if file.identity != identity or not file.lock(exclusive=False):
                return None
            self._locked = file
            status = path.stat()  # until it was locked, the publisher could write another version to it
        except OSError:
            status = None
        if status is not None and (status.st_dev, status.st_ino) == identity:
            return path
        self.release()
        return None

    async def _download(self, manifest: WeightManifest, record_received: Callable[[int], None]) -> Path:
        """Download into the file of the previous download, so that memory holds one. `record_received` gets the number
        of bytes so far."""
        if self._folder is None:
            self._folder = self._open_folder(manifest.num_bytes)
        path = self._folder / "download.safetensors"
        if self._own is None or len(self._own.data) != manifest.num_bytes:
            if self._own is not None:
                path.unlink()
                self._own.close()
                self._own, self._own_hash = None, ""
            self._own = MappedFile(path, num_bytes=manifest.num_bytes)
        base, self._own_hash = self._own_hash, ""  # until all of it has another version
        loop = asyncio.get_running_loop()

        def record(num_bytes: int) -> None:
            loop.call_soon_threadsafe(record_received, num_bytes)

        download = Download(manifest, self._token, self._shared.begin(manifest, self._own.data, base), record)
        thread = loop.run_in_executor(None, download.run)
        try:
            await asyncio.shield(thread)
        except asyncio.CancelledError:
            download.stop()
            await asyncio.wait({thread})  # it writes to the file until it has ended
            raise
        self._own_hash, self.transfer_bytes = manifest.file_hash, download.num_transferred
        return path


async def find_head_url(head: str, path: contract.UrlPath) -> str:
    """Return the URL of a path of the head. TransientError if the head has no address."""
    addresses = await asyncio.to_thread(resolve, head)
    if not addresses:
        raise TransientError(f"the head {head!r} has no address")
    return f"http://{addresses[0]}:{listening_port(contract.PORT_DRIVER)}{path}"


async def report_hang(head: str, token: str, part: HungPart) -> None:
    """Tell the head that this replica's engine hangs, if it listens."""
    timeout, headers = aiohttp.ClientTimeout(total=_HANG_SECONDS), {"Authorization": f"Bearer {token}"}
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            for address in await asyncio.to_thread(resolve, head):
                url = f"http://{address}:{listening_port(contract.PORT_DRIVER)}{contract.UrlPath.HUNG}"
                await session.post(url, data=part.model_dump_json(), allow_redirects=False)


class EngineLoader:
    """Loads versions into vLLM's engine, and labels the tokens that it samples.

    Invariant: a token is labelled with a version only if the engine's digest is the publisher's; until then, and after
    a failure, with UNVERIFIED.
    """

    def __init__(self, engine: Any, update_mode: UpdateMode, adapters: Sequence[AdapterFolder] = ()) -> None:
        """`adapters`: where the engine finds the published ones; empty: whole weights are published."""
        self._engine, self._adapters = engine, adapters
        self._pause_mode, self._clears_cache = _PAUSES[update_mode]
        self._is_verified = False
        """Whether everything in the caches is of a published version. Requests are salted with theirs."""
        self._is_cache_asleep = False
        self.exclusive = asyncio.Lock()
        """Held by who loads, or changes between sleeping and waking."""

    async def sleep(self, level: Level) -> None:
        """Abort all requests, and free the cache and, with level 2, the weights. May be repeated."""
        self._is_cache_asleep, self._is_verified = True, False
        await self._engine.sleep(level, mode="abort")

    async def wake_weights(self, level: Level) -> None:
        """Allocate the weights again after `sleep`. The cache stays asleep until `load` has verified a version."""
        await self._engine.wake_up(["weights"])
        if level == 2:
            await self._engine.collective_rpc("rljob_fill")

    async def measure(self) -> int:
        """Return the bytes that the engine holds (see EngineMemory)."""
        return sum(await self._engine.collective_rpc("rljob_memory"))

    async def warm_up(self) -> None:
        """Send a first request, which pays for lazy initialization, so that no episode does."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=2, logprobs=0, ignore_eos=True)
        async for _ in self._engine.generate({"prompt_token_ids": [1, 2, 3]}, parameters, request_id="warm-up"):
            pass

    async def adopt(self, manifest: WeightManifest) -> RolloutWeights:
        """Label tokens with `manifest`, which stands for the weights that the engine has loaded at its start."""
        await self._engine.update_weight_version(manifest.key)
        self._is_verified = True
        return RolloutWeights(generation=manifest.generation, version=manifest.version)

    async def load(
        self, path: Path | None, manifest: WeightManifest, record_draining: Callable[[bool], None]
    ) -> RolloutWeights:
        """Pause the engine, load the file, or without one what the ranks on its devices hand over, wake its cache, and
        resume. After an exception, the weights are undefined. `record_draining` gets True if the pause waits for
        requests in flight, and False before the load."""
        engine = self._engine
        begin = time.perf_counter()
        try:
            if self._pause_mode == "wait":
                record_draining(True)
            await engine.pause_generation(
                mode=self._pause_mode, clear_cache=self._clears_cache or not self._is_verified
            )
            if self._pause_mode == "wait":
                begin = time.perf_counter()  # it was generating until now
            record_draining(False)
            load_begin = time.perf_counter()
            keeps_others, self._is_verified = self._is_verified, False
            await engine.update_weight_version(UNVERIFIED)
            digests = await self._replace(path, manifest, keeps_others)
            checksum = str(sum(map(Digest.parse, digests), start=Digest()))
            if checksum != manifest.checksum:
                raise TransientError(f"the engine's digest is {checksum}, the publisher's {manifest.checksum}")
            await engine.update_weight_version(manifest.key)
            if self._is_cache_asleep:
                await engine.wake_up(["kv_cache"])
                self._is_cache_asleep = False
            self._is_verified = True
            load_seconds = time.perf_counter() - load_begin
        except BaseException:
            # The requests would continue with undefined weights. The error of a dead engine must not replace this one:
            # it may be a cancellation.
            with contextlib.suppress(Exception):
                await engine.pause_generation(mode="abort", clear_cache=True)
            with contextlib.suppress(Exception):
                await self._resume()
            raise
        await self._resume()
        return RolloutWeights(
            generation=manifest.generation,
            version=manifest.version,
            file_hash=manifest.file_hash,
            checksum=checksum,
            pause_seconds=time.perf_counter() - begin,
            load_seconds=load_seconds,
        )

    async def _resume(self) -> None:
        if not self._is_cache_asleep:
            await self._engine.resume_generation()

    async def _replace(self, path: Path | None, manifest: WeightManifest, keeps_others: bool) -> list[str]:
        """Replace the weights, or the adapters; with `keeps_others` those that have changed. Return the digest of each
        worker's part."""
        engine = self._engine
        if self._adapters:
            assert path is not None, "adapters are published as files"
            for adapter in self._adapters:
                if adapter.place(path) or not keeps_others:
                    await engine.add_lora(adapter.build_request(reload=True))
            return await engine.collective_rpc("rljob_adapter_digest")
        await engine.start_weight_update()
        try:
            await engine.update_weights(_build_update(path, manifest))
        except Exception:
            # Of several workers, those that got their weights would refuse to start the next update.
            with contextlib.suppress(Exception):
                await engine.finish_weight_update()
            raise
        await engine.finish_weight_update()
        return await engine.collective_rpc("rljob_digest")


def _build_update(path: Path | None, manifest: WeightManifest) -> Any:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    source = {"key": manifest.key} if path is None else {"path": str(path)}
    return WeightTransferUpdateRequest(update_info={**source, "digest_unit": manifest.digest_unit})


def find_engine_reason(vllm_config: VllmConfig, model_config: ModelConfig) -> str:
    """Return why the engine's settings need the checkpoint; empty if they do not."""
    if model_config.quantization is not None:
        return "a quantized model has values that no pull replaces"
    if vllm_config.speculative_config is not None:
        return "no pull replaces the draft model"
    return ""


def choose_level(config: VllmConfig) -> Level:
    """Return how deep the engine sleeps: weights are dropped if a pull replaces all."""
    return 1 if config.lora_config is not None or find_engine_reason(config, config.model_config) else 2


_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that --max-lora-rank accepts."""


def published_adapter(spec: RLJobSpec, config: Mapping[str, Any]) -> Lora | None:
    """Return the settings of the adapters that rollouts load; None if they load whole weights. `config`: config.json of
    the model."""
    return spec.trainer.lora if publishes_adapter(spec, config) else None


def build_lora_arguments(lora: Lora, num_slots: int) -> list[str]:
    rank = next(rank for rank in _VLLM_RANKS if rank >= lora.rank)
    return ["--enable-lora", "--max-loras", str(max(1, num_slots)), "--max-lora-rank", str(rank)]


def build_folders(folder: Path, lora: Lora, num_slots: int) -> list[AdapterFolder]:
    """Return the folder of each published adapter. `num_slots`: of a service; 0: there is one adapter, for all."""
    slots = range(1, num_slots + 1) if num_slots else (0,)
    return [AdapterFolder(folder / str(slot), lora, slot) for slot in slots]


class AdapterFolder:
    """peft's files of an adapter that the engine is to load."""

    def __init__(self, folder: Path, lora: Lora, slot: int = 0) -> None:
        """`slot`: its number in a service, from 1; 0: it is the only one."""
        self._tensors, self._slot = folder / "adapter_model.safetensors", slot
        # The published tensors have the scale alpha / rank already, so that the engine holds them bit for bit.
        config = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.rank, "target_modules": lora.target_modules}
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(config))

    def place(self, path: Path) -> bool:
        """Copy the adapter from the published file at `path`: vLLM may keep its tensors mapped, and the file gets other
        versions. Return whether they differ from those before."""
        import torch
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        prefix = f"{slot_name(self._slot)}." if self._slot else ""
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            tensors = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
            before = load_file(self._tensors) if self._tensors.exists() else {}
            if before and all(torch.equal(tensor, before[name]) for name, tensor in tensors.items()):
                return False
            self._tensors.unlink(missing_ok=True)
            save_file(tensors, self._tensors)
        return True

    def build_request(self, *, reload: bool = False) -> LoRARequest:
        """Return vLLM's name for the adapter. `reload`: replace what is loaded."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(slot_name(self._slot), self._slot or 1, str(self._tensors.parent), load_inplace=reload)
