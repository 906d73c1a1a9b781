"""What the locked torch (2.13) has and torch 2.11 lacks, and how that is met. The only file that knows.

`unpack.py` copies it into the environment, where each Python imports it at its start, so it imports no torch itself.
With a torch that has all, it changes nothing. vLLM 0.32 itself lacks nothing but `_qutlass_C` (contents.yaml).
"""

import importlib.abc
import importlib.machinery
import sys


def _add_recompute(module):
    """`_RECOMPUTE`, the mark of a result to compute again: with one, policy/compilation.py can be imported.
    `trainer.gradientCheckpointing: selective` does not work without torch's own."""
    if not hasattr(module, "_RECOMPUTE"):
        module._RECOMPUTE = object()


def _accept_gqa(module):
    """`varlen_attn(enable_gqa=)`: 2.11 does not compare the numbers of heads, and its kernel takes fewer key heads."""
    inner = module.varlen_attn
    if "enable_gqa" not in inner.__code__.co_varnames:
        module.varlen_attn = lambda *args, enable_gqa=False, **kwargs: inner(*args, **kwargs)


MET = {"torch.utils.checkpoint": _add_recompute, "torch.nn.attention.varlen": _accept_gqa}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in MET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), MET[name](module))
        return spec


sys.meta_path.insert(0, _Finder())
