"""The forward of a model's decoder layers: spec.trainer.compile and spec.trainer.gradientCheckpointing.

Each layer is compiled alone, with dynamic shapes, so that layers share the code and micro-batches need no new one.
FSDP's hooks and the head stay outside. Invariant: a layer that the compiler cannot handle runs as it is, unless the job
demands compilation, and keeps what its plan says. Activations are not recomputed by transformers' own switch, which
needs modules in training mode: that would also turn on the dropout of their configuration.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import _RECOMPUTE, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rljob_api.errors import UserError
from rljob_api.manifest.base import Choice, decide
from rljob_inputs.memory.trainer import Recomputation

_PRODUCTS = {"aten::mm": 1, "aten::addmm": 2, "aten::_grouped_mm": 1}
"""Matrix products, the last one of experts, with the number of the argument [..., inner, outer]. Not bmm, whose results
are the recurrences of hybrids and the scores of eager attention, which are long."""
_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
)
_CHEAP_RATIO = 8
"""A product whose result is this many times wider than what it sums over costs little for what it takes: those of
adapters."""

Forward = Callable[..., Any]


def recompute(forward: Forward, choice: Recomputation) -> Forward:
    """Return `forward` of a layer, which keeps what `choice` says. Use it before the layer is an FSDP unit: then the
    parameters are gathered once for the second forward and the backward pass."""
    if choice == "none":
        return forward
    if choice == "full":
        return partial(checkpoint, forward, use_reentrant=False)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=_build_contexts)


def _build_contexts() -> tuple[Any, Any]:
    """Return the contexts of one forward pass and of its repetition."""

    def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        schema = getattr(operator, "_schema", None)
        if schema is not None and schema.is_mutable:
            for argument, value in zip(schema.arguments, args, strict=False):
                if argument.is_write and isinstance(value, Tensor):
                    _forget(first.storage, value)
        return _choose(operator, args)

    first, second = create_selective_checkpoint_contexts(choose)
    return first, second


def _forget(kept: dict[Any, dict[int, Any]], changed: Tensor) -> None:
    """Compute again what was kept and then changed in place, such as a product to which a bias is added."""
    memory = changed.untyped_storage()._cdata
    for results in kept.values():
        for index, result in results.items():
            values = [getattr(part, "val", None) for part in (result if isinstance(result, tuple) else (result,))]
            if any(isinstance(each, Tensor) and each.untyped_storage()._cdata == memory for each in values):
                results[index] = _RECOMPUTE


def _choose(operator: Any, args: tuple[Any, ...]) -> CheckpointPolicy:
    """Return whether selective keeps the operator's result: most of the arithmetic is in few results."""
    is_kept = operator.name() in _ATTENTION
    if (place := _PRODUCTS.get(operator.name())) is not None:
        inner, outer = args[place].shape[-2:]
        is_kept = _CHEAP_RATIO * inner > outer
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


log = logging.getLogger(__name__)

_C_COMPILERS = ("cc", "gcc", "clang")
_SELECTIVE_BUDGET = 0.5
"""What the compiler may keep with selective, as a share of what it keeps by default. It then recomputes what costs
least, which is never more than a small matrix product (test_compilation)."""


class CompiledLayers:
    """The forward passes of the layers of one model, or other code that runs as it is if one compilation fails."""

    def __init__(self, *, is_required: bool, name: str = "layers") -> None:
        """`is_required`: raise UserError where the compiler fails."""
        self.is_required, self._name = is_required, name
        self.failure = ""
        """Why the layers run without compilation; empty: they do not."""

    def build(self, forward: Forward, choice: Recomputation) -> Forward:
        """Return the compiled `forward` of one layer, which keeps what `choice` says."""
        plain, compiled = recompute(forward, choice), torch.compile(forward, dynamic=True)
        if choice == "full":
            compiled = recompute(compiled, choice)
        # A checkpoint around compiled code sees none of its operators, so selective is the compiler's own.
        return self.guard(compiled, plain, _SELECTIVE_BUDGET if choice == "selective" else 1.0)

    def guard(self, compiled: Forward, plain: Forward, budget: float = 1.0) -> Forward:
        """Return `compiled`, or `plain` once the compiler has failed. `budget`: what compiled code may keep for its
        backward pass, as a share of what it keeps by default."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.failure:
                return plain(*args, **kwargs)
            _configure(budget)
            try:
                return compiled(*args, **kwargs)
            except TorchDynamoException as error:
                self._fail(error)
            return plain(*args, **kwargs)

        return call

    def _fail(self, error: TorchDynamoException) -> None:
        cause = getattr(error, "inner_exception", error)
        self.failure = next(filter(None, map(str.strip, str(cause).splitlines())), type(cause).__name__)
        if self.is_required:
            raise UserError(
                f"spec.trainer.compile: torch.compile cannot compile the model's {self._name}: {self.failure}; "
                "set compile: auto or never"
            ) from error
        log.warning("spec.trainer.compile: %s run without compilation, because it failed: %s", self._name, self.failure)


def prepare_layers(
    layers: Iterable[nn.Module], choice: Recomputation, *, compiled: CompiledLayers | None = None
) -> None:
    """Have the layers keep what `choice` says for the backward pass. They compile at their first forward pass."""
    for layer in layers:
        layer.forward = compiled.build(layer.forward, choice) if compiled else recompute(layer.forward, choice)


def start_compiler(setting: Choice, *, decoder: Any, device: torch.device) -> CompiledLayers | None:
    """Return the compiler for the layers of `decoder`; None if they stay as they are, whose reason is logged. Raise
    UserError if `setting` is always, and the machine has no compiler."""
    if not decide(setting, automatic=device.type == "cuda"):
        return None
    obstacle = _missing_compiler(device)
    if setting == "always" and obstacle:
        raise UserError(
            f"spec.trainer.compile: torch.compile needs {obstacle}; use an image with one (trainer.image), "
            "or set compile: never"
        )
    if setting == "auto" and getattr(decoder, "_is_stateful", False):
        obstacle = obstacle or "layers with recurrences loop over the tokens, and each length would be compiled anew"
    if obstacle:
        log.warning("spec.trainer.compile: auto compiles nothing: %s", obstacle)
        return None
    return CompiledLayers(is_required=setting == "always")


def _missing_compiler(device: torch.device) -> str:
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            return f"a C++ compiler: {error}"
    elif not any(map(shutil.which, (os.environ.get("CC", ""), *_C_COMPILERS))):
        # Triton compiles the launchers of its kernels.
        return f"a C compiler: none of CC, {', '.join(_C_COMPILERS)} is on the PATH"
    return ""


def _configure(budget: float) -> None:
    """Tell the compiler what it may keep, in the thread that compiles: each has its own settings. They stay, since
    ranks compile nothing else."""
    from torch._functorch import config

    if config.activation_memory_budget != budget:
        config.activation_memory_budget = budget
    if not config.force_non_lazy_backward_lowering:  # else a backward pass that cannot be compiled fails later
        config.force_non_lazy_backward_lowering = True
