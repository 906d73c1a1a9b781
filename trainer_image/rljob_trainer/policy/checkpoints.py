"""A policy's state on disk: torch distributed checkpoints to resume from, and a Hugging Face folder to use the model.

Every function is a collective over the ranks. The driver marks a whole checkpoint as COMPLETE. Invariant: resuming with
the same world size repeats the uninterrupted run bit for bit. With another world size, parameters and optimizer state
are the same.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rljob_api.errors import UserError
from rljob_inputs.hub.repository import repository_name
from rljob_trainer.policy.policy import Policy

TRAINER_FOLDER = "trainer"
ADAPTER_FOLDER = "adapter"
"""In the export."""
_READABLE_FILE, _READABLE_FOLDER = 0o644, 0o755
_SHARD_BYTES = 4 << 30


def save_checkpoint(policy: Policy, folder: Path) -> None:
    """Write FOLDER/trainer: trained parameters, optimizer state, number of updates, the critic if there is one,
    and each rank's random generator."""
    policy.reshard()
    own = {"num_updates": policy.num_updates, f"generator.{dist.get_rank()}": torch.get_rng_state()}
    save(_state(policy) | own, checkpoint_id=folder / TRAINER_FOLDER)


def load_checkpoint(policy: Policy, folder: Path) -> None:
    """Restore what save_checkpoint wrote. A rank beyond the number of saved ranks keeps its own generator."""
    path = folder / TRAINER_FOLDER
    if not (path / ".metadata").is_file():
        raise UserError(f"{path}: trainer checkpoint not found; delete {folder} to resume from an older one")
    policy.reshard()
    state = _state(policy)
    state["num_updates"] = 0
    generator_key = f"generator.{dist.get_rank()}"
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    if generator_key in saved:
        state[generator_key] = torch.get_rng_state()
    load(state, checkpoint_id=path)
    set_state_dict(
        policy.model,
        policy.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=policy.adapters is None),  # the load above has missed nothing
    )
    if policy.critic is not None:
        policy.critic.load_state(state["critic"])
    policy.num_updates = state["num_updates"]
    if generator_key in saved:
        torch.set_rng_state(state[generator_key])


def export_model(policy: Policy, folder: Path, tokenizer_source: str) -> None:
    """Write a Hugging Face folder in the compute dtype; with LoRA, also FOLDER/adapter, in fp32, for peft and vLLM. One
    rename replaces an older folder with the complete one."""
    parameters = policy.gather_weights()
    adapters = {} if policy.adapters is None else policy.adapters.gather()
    if dist.get_rank() == 0:
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_model(policy, parameters, partial, tokenizer_source)
        if policy.adapters is not None:
            policy.adapters.save(adapters, partial / ADAPTER_FOLDER)
        # Some libraries write files with mode 0600, which the user of another Pod cannot read.
        for path in (partial, *partial.rglob("*")):
            path.chmod(_READABLE_FOLDER if path.is_dir() else _READABLE_FILE)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()


def _write_model(policy: Policy, parameters: dict[str, torch.Tensor], folder: Path, tokenizer_source: str) -> None:
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoTokenizer

    config = type(policy.config).from_dict(policy.config.to_dict())
    config.dtype = policy.dtype
    config.save_pretrained(folder)
    if policy.generation_config is not None:
        policy.generation_config.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(repository_name(tokenizer_source), **policy.source_options)
    tokenizer.save_pretrained(folder)
    save_torch_state_dict(parameters, folder, max_shard_size=_SHARD_BYTES)


def _state(policy: Policy) -> dict[str, Any]:
    # This also creates the state of a new optimizer, which loading overwrites in place.
    model, optimizer = get_state_dict(policy.model, policy.optimizer)
    if policy.adapters is not None:  # the other parameters are those of spec.model
        trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
        model = {name: value for name, value in model.items() if name in trained}
    critic = {} if policy.critic is None else {"critic": policy.critic.state()}
    return {"model": model, "optimizer": optimizer, **critic}
