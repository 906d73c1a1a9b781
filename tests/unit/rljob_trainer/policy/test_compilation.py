import shutil
from types import SimpleNamespace

import pytest
import torch

from rljob_api.errors import UserError
from rljob_trainer.policy.compilation import CompiledLayers, prepare_layers, start_compiler

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DECODER, HYBRID = SimpleNamespace(), SimpleNamespace(_is_stateful=True)


@pytest.fixture
def no_cpp_compiler():
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        yield


def start(setting, decoder=DECODER, device=CPU):
    return start_compiler(setting, decoder=decoder, device=device)


def test_cpu_without_a_cpp_compiler_is_a_user_error(no_cpp_compiler):
    with pytest.raises(UserError) as caught:
        start("always")
    assert str(caught.value).startswith("spec.trainer.compile: torch.compile needs a C++ compiler: ")
    assert str(caught.value).endswith("use an image with one (trainer.image), or set compile: never")


def test_gpu_without_a_c_compiler_is_a_user_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match=r"^spec\.trainer\.compile: torch\.compile needs a C compiler: none of CC, cc"):
        start("always", device=CUDA)
    compiler = tmp_path / "gcc"
    compiler.touch(0o755)
    assert start("always", device=CUDA)


@pytest.mark.parametrize(
    ("decoder", "has_compiler", "reason"),
    [(DECODER, False, "a C compiler: none of"), (HYBRID, True, "layers with recurrences loop over the tokens")],
)
def test_auto_compiles_nothing_where_it_cannot_and_says_why(decoder, has_compiler, reason, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda name: name if has_compiler else None)
    assert start("auto", decoder, CUDA) is None
    assert f"spec.trainer.compile: auto compiles nothing: {reason}" in caplog.text
    assert start("never", decoder, CUDA) is None
    assert start("auto", decoder, CPU) is None, "it is for GPUs"


class Layer(torch.nn.Module):
    def forward(self, states):
        return states.sin() * 2


def fail(graph, inputs):
    raise RuntimeError("no kernel for sin")


@pytest.fixture(params=["forward", "backward"])
def broken_compiler(request, monkeypatch):
    """Fails at one of the passes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_compiler

    good = make_boxed_compiler(lambda graph, inputs: graph.forward)
    compilers = {"fw_compiler": good, "bw_compiler": good} | {
        {"forward": "fw_compiler", "backward": "bw_compiler"}[request.param]: fail
    }
    compile_, backend = torch.compile, aot_autograd(**compilers)
    monkeypatch.setattr(torch, "compile", lambda forward, **options: compile_(forward, backend=backend, **options))
    with torch._dynamo.config.patch(disable=False):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("choice", ["none", "selective", "full"])
def test_layers_that_the_compiler_cannot_handle_run_as_they_are(choice, broken_compiler, caplog):
    layers, compiled = [Layer(), Layer()], CompiledLayers(is_required=False)
    prepare_layers(layers, choice, compiled=compiled)
    states = torch.ones(3, requires_grad=True)
    layers[1](layers[0](states)).sum().backward()
    expected = torch.ones(3, requires_grad=True)
    ((expected.sin() * 2).sin() * 2).sum().backward()
    assert torch.equal(states.grad, expected.grad)
    assert "no kernel for sin" in compiled.failure
    assert len([record for record in caplog.records if "run without compilation" in record.message]) == 1


def test_a_compiler_that_fails_is_a_user_error_if_the_job_demands_it(broken_compiler):
    layer = Layer()
    prepare_layers([layer], "none", compiled=CompiledLayers(is_required=True))
    with pytest.raises(UserError, match=r"^spec\.trainer\.compile: .* cannot compile .*; set compile: auto or"):
        layer(torch.ones(3, requires_grad=True))
