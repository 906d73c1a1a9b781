"""Weights that are gathered already, as files of a store."""

from collections.abc import Mapping

from torch import Tensor

from rljob_api.wire.weights import DigestUnit, WeightManifest
from rljob_trainer.weights.checksum import memory_key
from rljob_trainer.weights.mapped import TensorSpec
from rljob_trainer.weights.store import WeightStore


def publish(
    store: WeightStore, weights: Mapping[str, Tensor], generation: str, version: int, unit: DigestUnit = "element"
) -> WeightManifest:
    """Publish tensors. Of tied names, the first is published: a file cannot share memory."""
    first_names: dict[object, str] = {}
    for name, tensor in weights.items():
        first_names.setdefault(memory_key(tensor), name)
    distinct = {name: weights[name] for name in first_names.values()}
    specs = {name: TensorSpec.of(tensor) for name, tensor in distinct.items()}
    return store.publish_stream(specs, distinct.items(), generation, version, unit)
