"""A policy's state on disk: torch distributed checkpoints to resume from, and a Hugging Face folder to use the model.

Every function is a collective over the ranks. A rank that does not see the run's folder sends its files to the head.
The driver marks a whole checkpoint as COMPLETE, and an export by its name. Invariant: resuming with the same number of
ranks and the same mesh repeats the uninterrupted run bit for bit. With others, parameters, optimizer state and the
number of updates are the same bit for bit; later updates differ by the order in which gradients are summed.

The files of an export besides its weights: config.json, tokenizer and chat, and what else the source has.

config.json is the source's own, with the type of its weights, as both generations of readers need it: transformers 5
writes `rope_parameters`, `dtype`, and some sizes under new names. transformers 4, older vLLM and converters read
`rope_theta`, `rope_scaling` and `torch_dtype`, and take their defaults where these are missing. Of a multimodal model,
transformers 5 reads `tie_word_embeddings` of the whole, transformers 4 that of its text, and either makes up a head
that it does not find. Invariants: what the source spells in one way is not changed there, but its type, and whether the
head is tied, which the weights say. A server of the export renders prompts as the job did (given
data.chatTemplateArguments, for which a Hugging Face folder has no place), and ends answers at the tokens at which
rollouts ended them. The tokenizer's files are the source's own, since transformers 5 writes some that transformers 4
cannot read.
"""

import contextlib
import copy
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from rljob_inputs.models.config import EXPORTED_ADAPTER
from rljob_inputs.models.files import open_model, place_model
from rljob_trainer.policy.checkpoint_names import persistent_buffers, to_checkpoint
from rljob_trainer.policy.checkpoint_storage import METADATA, CheckpointWriter, build_reader, first_failure, restore
from rljob_trainer.policy.host_copy import HostCopy
from rljob_trainer.policy.lora import MergeCost
from rljob_trainer.policy.optimizer import keeping_settings
from rljob_trainer.policy.policy import Policy
from rljob_trainer.run_folder.client import RemoteFolder
from rljob_trainer.run_folder.file_facts import Checkpoint, FileFacts, verify_files
from rljob_trainer.temporary import TemporaryFolder
from rljob_trainer.written_tokenizer import load_written_tokenizer

_FILE: Final = "config.json"
_FULL, _LOCAL = "full_attention", "sliding_attention"
_LONG: Final = "longrope"
_SCALINGS: Final = ("linear", "dynamic", "yarn", "llama3", _LONG)
"""Which transformers 4 has."""


def write_config(folder: Path, loaded: Any, dtype: str, architecture: str, *, is_tied: bool) -> None:
    """Replace config.json in the folder, which is the source's. `loaded`: of transformers, for the same model.
    `is_tied`: whether its head has no weights of its own."""
    source = json.loads((folder / _FILE).read_text(encoding="utf-8-sig"))
    standard = type(loaded).from_pretrained(folder)
    text = standard.get_text_config(decoder=True)
    for config, part in _list_parts(standard, source):
        part |= {"dtype": dtype, "torch_dtype": dtype}
        if config in (standard, text):
            part["tie_word_embeddings"] = is_tied
        for older, name in config.attribute_map.items():
            if name in part:
                part.setdefault(older, part[name])
        if parameters := getattr(config, "rope_parameters", None):
            part["rope_parameters"] = parameters
            for name, value in spell_rope(parameters).items():
                part.setdefault(name, value)
    source["architectures"] = [architecture]
    (folder / _FILE).write_text(json.dumps(source, indent=2, ensure_ascii=False) + "\n")


def _list_parts(config: Any, written: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    yield config, written
    for name in config.sub_configs:
        if isinstance(part := written.get(name), dict):
            yield from _list_parts(getattr(config, name), part)


def spell_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` as transformers 4 spells them. Gemma 3 has some for each type of layer; a share of the
    dimensions for one type has no older spelling, and readers take one that is spelled for all types."""
    full = parameters.get(_FULL, parameters)
    names = ("rope_theta", "partial_rotary_factor") if full is parameters else ("rope_theta",)
    own = {name: full[name] for name in names if name in full}
    scaling = {name: value for name, value in full.items() if name != "rope_theta"}
    kind = scaling.get("rope_type", "default")
    if kind == _LONG:  # Phi-3 takes these three alone
        own["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
        scaling = {"type": kind, **{name: scaling[name] for name in ("short_factor", "long_factor")}}
    if kind in _SCALINGS or (kind == "default" and scaling.keys() - own.keys() - {"rope_type"}):
        own["rope_scaling"] = scaling
    if _LOCAL in parameters:
        own["rope_local_base_freq"] = parameters[_LOCAL]["rope_theta"]
    return own


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json", ".ot")
_PAGES = (".md", ".gitattributes", ".gitignore")
"""Files of a repository; they describe another model."""


def copy_other_files(source: str, revision: str, folder: Path) -> None:
    """Copy them from `source`, a folder, hf://org/name or s3://bucket/path, to `folder`. An export writes its own
    files over them."""
    files = open_model(source, revision)
    for name in files.sizes:
        if "/" not in name and not name.startswith(".") and not name.endswith((*_WEIGHTS, *_PAGES)):
            shutil.copyfile(files.fetch(name), folder / name)


_CONFIG: Final = "tokenizer_config.json"
_OWN: Final = ("tokenizer.json", _CONFIG)


def save_chat(
    folder: Path, tokenizer: Any, generation_config: Any | None, *, chat_template: str | None, stop: Sequence[str]
) -> None:
    """Write the files of the tokenizer that the folder lacks, and generation_config.json. `generation_config`: of
    transformers; None: the model has none. `chat_template`: of the job; None: the tokenizer's. `stop`: what ends
    answers, resolved."""
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    own = {name: (folder / name).read_bytes() for name in _OWN if (folder / name).is_file()}
    tokenizer.save_pretrained(folder)
    for name, content in own.items():
        (folder / name).write_bytes(content)
    config = spell_config(json.loads((folder / _CONFIG).read_text(encoding="utf-8-sig")))
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / _CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if generation_config is not None:
        special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        written = copy.deepcopy(generation_config)
        written.eos_token_id = add_end_ids(written.eos_token_id, stop, special)
        written.save_pretrained(folder)


def spell_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json with what transformers 5 alone reads under the names that both generations have."""
    spelled = dict(config)
    if spelled.get("tokenizer_class") == "TokenizersBackend":
        spelled["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(spelled.get("extra_special_tokens"), list):
        spelled["additional_special_tokens"] = spelled.pop("extra_special_tokens")
    return spelled


def add_end_ids(given: int | list[int] | None, stop: Sequence[str], special: Mapping[str, int]) -> Any:
    """Return eos_token_id with the special tokens of `stop`, and unchanged without any."""
    known = given if isinstance(given, list) else [] if given is None else [given]
    missing = [special[text] for text in dict.fromkeys(stop) if text in special and special[text] not in known]
    return [*known, *missing] if missing else given


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
    # safetensors refuses a part of a larger storage: FSDP2 gathers what the ranks do not divide with padding.
    owned = {name: t.clone() if t.nbytes < t.untyped_storage().nbytes() else t for name, t in weights.items()}
    tensors = policy.other_tensors.read() | to_checkpoint(network, owned)
    save_torch_state_dict(tensors, folder, max_shard_size=_SHARD_BYTES)


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


class CheckpointSaver:
    """Saves the checkpoints of one rank: at once, or in the background from a copy in the host's memory.

        begin: state --> copy      wait: .-- the copy is written by a thread, next to updates, publishing and inspecting
                                         '-> its error, or what this rank wrote

    Invariant: what is written is the state at `begin`, whatever happens to the policy until the write has ended.
    """

    def __init__(self, policy: Policy, *, asynchronous: bool) -> None:
        """A collective."""
        self._policy, self._asynchronous = policy, asynchronous
        self._writing: Future[Any] | None = None
        self._files: dict[str, FileFacts] = {}
        if asynchronous:
            # The ranks' threads meet in a separate group: the order of collectives in the others is that of
            # training. gloo, because no part of the copy is on a GPU.
            self._group = dist.new_group(backend="gloo")
            self._copy = HostCopy()

    def begin(self, folder: Path | RemoteFolder) -> None:
        """Return once training may continue: with a copy of what is then written to FOLDER/trainer, or after the write.
        A checkpoint that is still being written is waited for."""
        self.wait()
        if not self._asynchronous:
            self._files = save_checkpoint(self._policy, folder)
            return
        writer = CheckpointWriter(folder / TRAINER_FOLDER)
        self._files = writer.files  # to be filled
        self._writing = cast(
            "Future[Any]",
            async_save(
                read_state(self._policy),
                storage_writer=writer,
                process_group=self._group,
                async_stager=self._copy,
            ),
        )

    def wait(self) -> dict[str, FileFacts]:
        """Wait until the last checkpoint is written by all ranks, and return this rank's files, by name. Raise why it
        was not written, once: the next one may be."""
        if (writing := self._writing) is not None:
            try:
                with first_failure():
                    writing.result()
            finally:
                self._writing = None
        return self._files
