"""Adapters in vLLM (spec.trainer.lora.publish: adapter): its arguments, its name for the adapter, and peft's files.

There is one adapter, which every request uses. vLLM has one slot for it, and a weight update replaces its contents.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.roles import Lora
from rljob_api.wire.contract import SERVED_MODEL_NAME
from rljob_inputs.models.adapters import publishes_adapter

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_ID = 1
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that --max-lora-rank accepts."""


def published_adapter(spec: RLJobSpec, config: Mapping[str, Any]) -> Lora | None:
    """Return the settings of the adapter that rollouts load; None if they load whole weights. `config`: config.json of
    the model."""
    return spec.trainer.lora if publishes_adapter(spec, config) else None


def build_lora_arguments(lora: Lora) -> list[str]:
    rank = next(rank for rank in _VLLM_RANKS if rank >= lora.rank)
    return ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]


class AdapterFolder:
    """peft's files of the adapter that the engine is to load."""

    def __init__(self, folder: Path, lora: Lora) -> None:
        self._folder = folder
        # The published tensors have the scale alpha / rank already, so that the engine holds them bit for bit.
        config = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.rank, "target_modules": lora.target_modules}
        (folder / "adapter_config.json").write_text(json.dumps(config))

    def place(self, path: Path) -> None:
        """Copy the published file at `path` to the folder's tensors: vLLM may keep them mapped, and the file gets other
        versions."""
        tensors = self._folder / "adapter_model.safetensors"
        tensors.unlink(missing_ok=True)
        shutil.copyfile(path, tensors)

    def build_request(self, *, reload: bool = False) -> LoRARequest:
        """Return vLLM's name for the adapter. `reload`: replace what is loaded."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(SERVED_MODEL_NAME, _ID, str(self._folder), load_inplace=reload)
