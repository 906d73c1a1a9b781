"""A policy's state on disk: torch distributed checkpoints to resume from, and a Hugging Face folder to use the model.

Every function is a collective over the ranks. A rank that does not see the run's folder sends its files to the head.
The driver marks a whole checkpoint as COMPLETE, and an export by its name. Invariant: resuming with the same number of
ranks and the same mesh repeats the uninterrupted run bit for bit. With others, parameters, optimizer state and the
number of updates are the same bit for bit; later updates differ by the order in which gradients are summed.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rljob_api.errors import UserError
from rljob_inputs.hub.repository import repository_name
from rljob_trainer.policy.checkpoint_names import persistent_buffers, to_checkpoint
from rljob_trainer.policy.checkpoint_storage import build_reader, build_writer, first_failure
from rljob_trainer.policy.policy import Policy
from rljob_trainer.run_folder.client import RemoteFolder

TRAINER_FOLDER = "trainer"
ADAPTER_FOLDER = "adapter"
"""In the export."""
_READABLE_FILE, _READABLE_FOLDER = 0o644, 0o755
_SHARD_BYTES = 4 << 30


def save_checkpoint(policy: Policy, folder: Path | RemoteFolder) -> None:
    """Write FOLDER/trainer."""
    with first_failure():
        save(read_state(policy), storage_writer=build_writer(folder / TRAINER_FOLDER))


def read_state(policy: Policy) -> dict[str, Any]:
    """Return what a checkpoint has: trained parameters, optimizer state, number of updates, the critic if there is one,
    and each rank's random generator. The tensors are those of the policy, which the next update changes."""
    policy.reshard()
    own = {"num_updates": policy.num_updates, f"generator.{dist.get_rank()}": torch.get_rng_state()}
    return _state(policy) | own


def load_checkpoint(policy: Policy, folder: Path | RemoteFolder) -> None:
    """Restore what save_checkpoint wrote. A rank beyond the number of saved ranks keeps its own generator."""
    reader = build_reader(folder / TRAINER_FOLDER)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except FileNotFoundError as error:
        raise UserError(
            f"{folder / TRAINER_FOLDER}: trainer checkpoint not found; delete {folder} to resume from an older one"
        ) from error
    policy.reshard()
    state = _state(policy)
    state["num_updates"] = 0
    generator_key = f"generator.{dist.get_rank()}"
    if generator_key in saved:
        state[generator_key] = torch.get_rng_state()
    with first_failure():
        load(state, storage_reader=reader)
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


def export_model(policy: Policy, folder: Path | RemoteFolder, tokenizer_source: str) -> None:
    """Write a Hugging Face folder in the compute dtype; with LoRA, also FOLDER/adapter, in fp32, for peft and vLLM."""
    weights = policy.gather_weights()
    adapters = {} if policy.adapters is None else policy.adapters.gather()
    if dist.get_rank() == 0:
        with _local_folder(folder) as local:
            _write_model(policy, weights, local, tokenizer_source)
            if policy.adapters is not None:
                policy.adapters.save(adapters, local / ADAPTER_FOLDER)
            # Some libraries write files with mode 0600, which the user of another Pod cannot read.
            for path in (local, *local.rglob("*")):
                path.chmod(_READABLE_FOLDER if path.is_dir() else _READABLE_FILE)
    dist.barrier()


@contextlib.contextmanager
def _local_folder(folder: Path | RemoteFolder) -> Iterator[Path]:
    """Yield the folder, or a temporary one that is sent to the head at the end: libraries write whole files."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="rljob-export-") as name:
        yield Path(name)
        folder.upload(Path(name))


def _write_model(policy: Policy, weights: dict[str, torch.Tensor], folder: Path, tokenizer_source: str) -> None:
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoTokenizer

    config = type(policy.config).from_dict(policy.config.to_dict())
    config.dtype = policy.dtype
    config.save_pretrained(folder)
    if policy.generation_config is not None:
        policy.generation_config.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(repository_name(tokenizer_source), **policy.source_options)
    tokenizer.save_pretrained(folder)
    network = policy.model.network
    weights |= {name: buffer.cpu() for name, buffer in persistent_buffers(network).items()}
    save_torch_state_dict(to_checkpoint(network, weights), folder, max_shard_size=_SHARD_BYTES)


def _state(policy: Policy) -> dict[str, Any]:
    # This also creates the state of a new optimizer, which loading overwrites in place.
    model, optimizer = get_state_dict(policy.model, policy.optimizer)
    if policy.adapters is not None:  # the other parameters are those of spec.model
        trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
        model = {name: value for name, value in model.items() if name in trained}
    critic = {} if policy.critic is None else {"critic": policy.critic.state()}
    return {"model": model, "optimizer": optimizer, **critic}
