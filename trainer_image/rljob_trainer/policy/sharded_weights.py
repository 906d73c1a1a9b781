"""Reads a checkpoint into a network that is sharded already: each rank reads its slices of each tensor.

transformers decides which tensor of the files becomes which parameter, as in its from_pretrained: names, tied weights,
experts that are one parameter, data types. Invariant: the network has the same parameters, buffers and configuration as
the text model of one that from_pretrained loads, and a rank holds no more than its shards, and the slices of a few
tensors.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from rljob_api.errors import UserError
from rljob_trainer.policy.attention import initial_attention
from rljob_trainer.policy.text_model import find_class, is_remote, keep_text

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_COMPARED_ROWS = 4096
_MAX_NAMED = 3


class UnreadableError(Exception):
    """The checkpoint cannot be read in slices; from_pretrained may load it whole. The message is the reason."""


@dataclass(frozen=True)
class OtherTensors:
    """What a checkpoint has besides the weights of the trained network: towers for images, layers that predict further
    tokens."""

    files: tuple[Path, ...] = ()
    names: frozenset[str] = frozenset()

    def read(self) -> dict[str, torch.Tensor]:
        with _open_files(self.files) as opened:
            return {name: opened[name].get_tensor(name) for name in sorted(self.names)}


@contextlib.contextmanager
def _open_files(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield the open file of each tensor, by name."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(cast(Any, safe_open)(path, framework="pt")) for path in paths]
        yield {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - no mapping


def require_weights(missing: Collection[str], unread: Collection[str]) -> None:
    """Raise UserError if weights are `missing` in a checkpoint: libraries would make them up. `unread`: what else it
    has."""
    if not missing:
        return
    more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    instead = f", but have {min(unread)}, which is not a weight of the model" if unread else ""
    raise UserError(f"its files lack the weights {', '.join(sorted(missing)[:_MAX_NAMED])}{more}{instead}")


class Skeleton:
    """A network on the meta device, and the files with its weights."""

    def __init__(self, network: Any, files: list[Path], dtype: torch.dtype) -> None:
        """Raise UserError if the files lack weights of `network`, and UnreadableError if some have another form. The
        network gets its buffers."""
        self.network, self._files, self._dtype = network, files, dtype
        with self._slices() as slices:
            self._left_out = _find_copies(network, slices)
            shapes = {name: _Shape(each) for name, each in slices.items() if name not in self._left_out}
            found = _assign(network, shapes, torch.device("meta"), dtype)
        self._unread = {name for name, shape in shapes.items() if not shape.is_read}
        missing = found.missing_keys - network.all_tied_weights_keys.keys()
        missing |= {
            target for target, source in network.all_tied_weights_keys.items() if {target, source} <= found.missing_keys
        }
        wrong = [name for name, *_ in found.mismatched_keys] + list(found.conversion_errors)
        require_weights(missing, self._unread)
        if wrong:
            raise UnreadableError(f"its files have {', '.join(sorted(wrong)[:_MAX_NAMED])} in another form")
        network.mark_tied_weights_as_initialized(found)
        # Compute what is not in the files, such as the frequencies of rotary embeddings.
        for module in network.modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None and not _is_saved(module, leaf):
                    module._buffers[leaf] = torch.empty_like(buffer, device="cpu")
        network.initialize_weights()
        network.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)
        # Whatever wraps or renames modules of the network later, its twin keeps their names.
        self._twin = deepcopy(network)
        self._modules = list(zip(network.modules(), self._twin.modules(), strict=True))

    @property
    def other_tensors(self) -> OtherTensors:
        return OtherTensors(tuple(self._files), frozenset(self._unread))

    def fill(self, device: torch.device) -> None:
        """Read this rank's slices onto `device`. FSDP2 has sharded every parameter that is used, over a mesh of the
        same or another type of device."""
        for module, twin in self._modules:
            twin._parameters.update({leaf: _on_mesh_of(module._parameters[leaf], device) for leaf in twin._parameters})
        unused = {name for name, parameter in self._twin.named_parameters() if not isinstance(parameter, DTensor)}
        with self._slices() as slices:
            left_out = self._left_out | self._unread | unused
            wanted = {name: each for name, each in slices.items() if name not in left_out}
            _assign(self._twin, wanted, device, self._dtype)
        self._adopt()

    def _adopt(self) -> None:
        """Give the network what its twin has read, in all places of a tied parameter."""
        read: dict[int, nn.Parameter] = {}
        for module, twin in self._modules:
            for leaf, parameter in twin._parameters.items():
                if parameter is not None and (before := module._parameters[leaf]) is not parameter:
                    read[id(before)] = _with_mesh_of(before, parameter)
            module._buffers.update({leaf: buffer for leaf, buffer in twin._buffers.items() if _is_saved(twin, leaf)})
        for module, twin in self._modules:
            for leaf in twin._parameters:
                module._parameters[leaf] = read.get(id(module._parameters[leaf]), module._parameters[leaf])
                twin._parameters[leaf] = None

    @contextlib.contextmanager
    def _slices(self) -> Iterator[dict[str, Any]]:
        """Yield the tensors of the files by name. Nothing is read yet."""
        with _open_files(self._files) as opened:
            yield {name: file.get_slice(name) for name, file in opened.items()}


def _on_mesh_of(parameter: nn.Parameter | None, device: torch.device) -> nn.Parameter | None:
    """Return a sharded parameter of the meta device as one of the same ranks' `device`: transformers moves what it
    reads to the mesh's device."""
    if not isinstance(parameter, DTensor) or (mesh := parameter.device_mesh).device_type == device.type:
        return parameter
    same = DeviceMesh.from_group(mesh.get_group(), device.type, mesh=mesh.mesh)
    spec = DTensorSpec(same, parameter.placements, tensor_meta=parameter._spec.tensor_meta)
    local = parameter.to_local()
    return nn.Parameter(DTensor(local, spec, requires_grad=False), requires_grad=parameter.requires_grad)


def _with_mesh_of(before: nn.Parameter, read: nn.Parameter) -> nn.Parameter:
    """Return what was read with the mesh on which FSDP2 has sharded the parameter."""
    if not isinstance(read, DTensor) or not isinstance(before, DTensor) or read.device_mesh == before.device_mesh:
        return read
    # Not from_local(), which would move it to the mesh's device.
    return nn.Parameter(DTensor(read.to_local(), before._spec, requires_grad=False), requires_grad=read.requires_grad)


class _Shape:
    """Stands for a tensor of a file, without data."""

    def __init__(self, tensor: Any) -> None:
        self._shape, self._dtype = tensor.get_shape(), tensor.get_dtype()
        self.is_read = False

    def get_shape(self) -> list[int]:
        return cast(list[int], self._shape)

    def get_dtype(self) -> str:
        return cast(str, self._dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.is_read = True
        return torch.empty(self._shape, device="meta")[index]


def find_files(repository: str, options: Mapping[str, Any]) -> list[Path]:
    """Return the safetensors files of a model in a folder or on the Hub, which are downloaded. Raise UnreadableError if
    there are none."""
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    found: dict[str, str | None] = {}
    for name in (_WEIGHTS, _INDEX):
        found[name] = cached_file(
            repository, name, revision=options.get("revision"), _raise_exceptions_for_missing_entries=False
        )
        if found[name] is not None:
            break
    if (single := found[_WEIGHTS]) is not None:
        return [Path(single)]
    if (index := found[_INDEX]) is None:
        raise UnreadableError("it has no safetensors files")
    paths, _ = get_checkpoint_shard_files(repository, index, revision=options.get("revision"))
    return [Path(path) for path in paths]


def build_network(config: Any, repository: str, *, dtype: torch.dtype, attention: str, options: dict[str, Any]) -> Any:
    """Return the language model of `config` on the meta device, without what reads no text. Raise UnreadableError if it
    brings its code, which may compute with the weights that it creates."""
    from transformers import GenerationConfig

    if is_remote(config, options):
        raise UnreadableError("its code is not part of transformers")
    if getattr(config, "quantization_config", None):
        raise UnreadableError("it is quantized")
    kind = find_class(config)
    with torch.device("meta"):
        network = kind._from_config(config, dtype=dtype, attn_implementation=initial_attention(kind, config, attention))
    keep_text(network)
    with contextlib.suppress(OSError):  # it has none; transformers derives one from the configuration
        network.generation_config = GenerationConfig.from_pretrained(
            repository, revision=options.get("revision") or "main"
        )
    return network


def _assign(network: Any, tensors: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Set the network's parameters and buffers from tensors of the files. Return transformers' report."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    settings = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=network._get_dtype_plan(dtype),
        device_map={"": device},
        weight_mapping=cast(Any, get_model_conversion_mapping(network)),
    )
    report, _ = convert_and_load_state_dict_in_model(network, dict(tensors), settings)
    return report


def _find_copies(network: Any, slices: Mapping[str, Any]) -> set[str]:
    """Return the tensors of tied weights that the files have a second time. Raise UnreadableError if the two differ:
    then transformers does not tie them."""
    copies = {
        target for target, source in network.all_tied_weights_keys.items() if target in slices and source in slices
    }
    for target in copies:
        source = network.all_tied_weights_keys[target]
        if not _is_equal(slices[target], slices[source]):
            raise UnreadableError(f"{target} and {source} should be the same, but differ in its files")
    return copies


def _is_equal(one: Any, other: Any) -> bool:
    if one.get_shape() != other.get_shape():
        return False
    starts = range(0, one.get_shape()[0], _COMPARED_ROWS)
    return all(torch.equal(one[i : i + _COMPARED_ROWS], other[i : i + _COMPARED_ROWS]) for i in starts)


def _is_saved(module: nn.Module, leaf: str) -> bool:
    return leaf not in module._non_persistent_buffers_set
