"""torch.compile of a model's decoder layers, by choice: spec.trainer.compile.

Each layer is compiled alone, with dynamic shapes, so that layers share the code and micro-batches need no new one.
FSDP's hooks and the head stay outside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

import torch
from torch import nn

from rljob_api.errors import UserError

_C_COMPILERS = ("cc", "gcc", "clang")


def compile_layers(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Compile the layers at their first forward pass. Raise UserError if the machine has no compiler."""
    _require_compiler(device)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _require_compiler(device: torch.device) -> None:
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise _no_compiler("a C++ compiler", str(error)) from None
    elif not any(map(shutil.which, (os.environ.get("CC", ""), *_C_COMPILERS))):
        # Triton compiles the launchers of its kernels.
        raise _no_compiler("a C compiler", f"none of CC, {', '.join(_C_COMPILERS)} is on the PATH")


def _no_compiler(what: str, reason: str) -> UserError:
    return UserError(
        f"spec.trainer.compile: torch.compile needs {what}: {reason}; use an image with one (trainer.image), "
        "or set compile: false"
    )
