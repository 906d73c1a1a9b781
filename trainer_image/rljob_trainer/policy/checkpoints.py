"""A policy's state on disk: torch distributed checkpoints to resume from, and a Hugging Face folder to use the model.

Every function is a collective over the ranks. A rank that does not see the run's folder sends its files to the head.
The driver marks a whole checkpoint as COMPLETE, and an export by its name. Invariant: resuming with the same number of
ranks and the same mesh repeats the uninterrupted run bit for bit. With others, parameters, optimizer state and the
number of updates are the same bit for bit; later updates differ by the order in which gradients are summed.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save

from rljob_inputs.models.adapters import EXPORTED_ADAPTER
from rljob_inputs.models.files import place_model
from rljob_trainer.policy.checkpoint_names import persistent_buffers, to_checkpoint
from rljob_trainer.policy.checkpoint_storage import METADATA, CheckpointWriter, build_reader, first_failure, restore
from rljob_trainer.policy.exported_chat import save_chat
from rljob_trainer.policy.exported_config import write_config
from rljob_trainer.policy.lora import MergeCost
from rljob_trainer.policy.optimizer import keeping_settings
from rljob_trainer.policy.policy import Policy
from rljob_trainer.policy.source_files import copy_other_files
from rljob_trainer.run_folder.client import RemoteFolder
from rljob_trainer.run_folder.file_facts import Checkpoint, FileFacts, verify_files
from rljob_trainer.temporary import TemporaryFolder
from rljob_trainer.written_tokenizer import load_written_tokenizer

TRAINER_FOLDER = "trainer"
_READABLE_FILE, _READABLE_FOLDER = 0o644, 0o755
_SHARD_BYTES = 4 << 30
_GENERATOR, _DEVICE_GENERATOR = "generator", "device-generator"


def save_checkpoint(policy: Policy, folder: Path | RemoteFolder) -> dict[str, FileFacts]:
    """Write FOLDER/trainer. Return what this rank wrote, by name."""
    writer = CheckpointWriter(folder / TRAINER_FOLDER)
    with first_failure():
        save(read_state(policy), storage_writer=writer)
    return writer.files


def verify_checkpoint(checkpoint: Checkpoint, folder: Path | RemoteFolder, rank: int, num_ranks: int) -> None:
    """Raise DamagedCheckpointError if this rank's share of FOLDER/trainer is not what was written. Each file is read by
    one rank: with as many ranks as before, by the one that wrote it and loads it next."""
    names = [name for name in checkpoint.files if name.startswith(f"{TRAINER_FOLDER}/")]
    index = f"{TRAINER_FOLDER}/{METADATA}"  # each rank reads it
    shares = [name for name in names if name != index]
    verify_files(folder, checkpoint.files, [index, *shares[rank::num_ranks]])


def read_state(policy: Policy) -> dict[str, Any]:
    """Return what a checkpoint has: trained parameters, optimizer state, number of updates, the critic if there is one,
    and each rank's random generator. The tensors are those of the policy, which the next update changes."""
    policy.reshard()
    return _state(policy) | {"num_updates": policy.num_updates} | _generators(policy)


def load_checkpoint(policy: Policy, folder: Path | RemoteFolder) -> None:
    """Restore what save_checkpoint wrote. A rank beyond the number of saved ranks keeps its own generator."""
    saved = build_reader(folder / TRAINER_FOLDER).read_metadata().state_dict_metadata
    policy.reshard()
    state = _state(policy)
    state["num_updates"] = 0
    generators = {name: value for name, value in _generators(policy).items() if name in saved}
    state |= generators
    restore(state, folder / TRAINER_FOLDER)
    with keeping_settings(policy.optimizer):
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
    for name in generators:
        if name.startswith(_DEVICE_GENERATOR):
            torch.cuda.set_rng_state(state[name], policy.device)
        else:
            torch.set_rng_state(state[name])


def load_weights(policy: Policy, folder: Path | RemoteFolder) -> None:
    """Restore the trained parameters that save_checkpoint wrote, and nothing else."""
    policy.reshard()
    state = {"model": _trained(policy, get_model_state_dict(policy.model))}
    restore(state, folder / TRAINER_FOLDER)
    options = StateDictOptions(strict=policy.adapters is None)
    set_model_state_dict(policy.model, state["model"], options=options)


def export_model(policy: Policy, folder: Path | RemoteFolder, tokenizer_source: str) -> float | None:
    """Write a Hugging Face folder in the compute dtype; with LoRA, also FOLDER/adapter, in fp32, for peft and vLLM.
    Return how much of the adapters' update is left in the merged weights, on rank 0; None without adapters."""
    cost = MergeCost()
    weights = policy.gather_weights(cost)
    adapters = {} if policy.adapters is None else policy.adapters.gather()
    try:
        if dist.get_rank() == 0:
            with _local_folder(folder) as local:
                _write_model(policy, weights, local, tokenizer_source)
                if policy.adapters is not None:
                    policy.adapters.save(adapters, local / EXPORTED_ADAPTER)
                # Some libraries write files with mode 0600, which the user of another Pod cannot read.
                for path in (local, *local.rglob("*")):
                    path.chmod(_READABLE_FOLDER if path.is_dir() else _READABLE_FILE)
    finally:
        dist.barrier()  # also after an error of rank 0, or the others would wait
    return cost.share


@contextlib.contextmanager
def _local_folder(folder: Path | RemoteFolder) -> Iterator[Path]:
    """Yield the folder, or a temporary one that is sent to the head at the end: libraries write whole files."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with TemporaryFolder("export") as name:
        yield Path(name)
        folder.upload(Path(name))


def _write_model(policy: Policy, weights: dict[str, torch.Tensor], folder: Path, tokenizer_source: str) -> None:
    """Write what was trained, and all that the source has besides: files for images, and tensors of other parts."""
    from huggingface_hub import save_torch_state_dict

    network = policy.model.network
    copy_other_files(policy.source, policy.source_options["revision"], folder)
    is_tied = bool(network.all_tied_weights_keys)
    dtype = str(policy.dtype).removeprefix("torch.")
    write_config(folder, policy.config, dtype, type(network).__name__, is_tied=is_tied)
    tokenizer = load_written_tokenizer(place_model(tokenizer_source, weights=False), **policy.source_options)
    template, sampling = policy.spec.model.chat_template, policy.spec.rollout.sampling
    inline = None if template is None else template.inline
    save_chat(folder, tokenizer, policy.generation_config, chat_template=inline, stop=sampling.stop)
    weights |= {name: buffer.cpu() for name, buffer in persistent_buffers(network).items()}
    owned = {name: _own_storage(tensor) for name, tensor in weights.items()}
    tensors = policy.other_tensors.read() | to_checkpoint(network, owned)
    save_torch_state_dict(tensors, folder, max_shard_size=_SHARD_BYTES)


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied if it is part of a larger storage, which safetensors refuses: FSDP2 gathers a parameter
    that the ranks do not divide with padding."""
    return tensor.clone() if tensor.nbytes < tensor.untyped_storage().nbytes() else tensor


def _generators(policy: Policy) -> dict[str, torch.Tensor]:
    """Return the states of this rank's random generators, from which the dropout of adapters is drawn."""
    rank = dist.get_rank()
    states = {f"{_GENERATOR}.{rank}": torch.get_rng_state()}
    if policy.device.type != "cpu":
        states[f"{_DEVICE_GENERATOR}.{rank}"] = torch.cuda.get_rng_state(policy.device)
    return states


def _state(policy: Policy) -> dict[str, Any]:
    # This also creates the state of a new optimizer, which loading overwrites in place.
    model, optimizer = get_state_dict(policy.model, policy.optimizer)
    model = _trained(policy, model)
    critic = {} if policy.critic is None else {"critic": policy.critic.state()}
    return {"model": model, "optimizer": optimizer, **critic}


def _trained(policy: Policy, model: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint has of the model's state: with adapters, these alone. The rest is of spec.model."""
    if policy.adapters is None:
        return model
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in model.items() if name in trained}
