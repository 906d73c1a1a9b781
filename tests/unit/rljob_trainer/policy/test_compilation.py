import pytest
import torch

from rljob_api.errors import UserError
from rljob_trainer.policy.compilation import compile_layers


def test_cpu_without_a_cpp_compiler_is_a_user_error():
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}), pytest.raises(UserError) as caught:
        compile_layers([], torch.device("cpu"))
    assert str(caught.value).startswith("spec.trainer.compile: torch.compile needs a C++ compiler: ")
    assert str(caught.value).endswith("use an image with one (trainer.image), or set compile: false")


def test_gpu_without_a_c_compiler_is_a_user_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match=r"^spec\.trainer\.compile: torch\.compile needs a C compiler: none of CC, cc"):
        compile_layers([], torch.device("cuda", 0))
    compiler = tmp_path / "gcc"
    compiler.touch(0o755)
    compile_layers([], torch.device("cuda", 0))
