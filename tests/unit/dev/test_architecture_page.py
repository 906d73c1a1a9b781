"""The table of architectures in the docs is the one that programs read."""

from dev.architecture_page import render, replace
from rljob_inputs.models.architectures import read_table
from tests.paths import ROOT

PAGE = ROOT / "docs/models-and-data.md"


def test_page_is_up_to_date():
    page = PAGE.read_text()
    assert page == replace(page, read_table()), "run `make generate`"


def test_page_says_what_trains_where_and_why_not():
    text = render(read_table())
    assert "| `Qwen3_5ForConditionalGeneration` | multimodal, hybrid |  | bfloat16 alone | yes |" in text
    assert "| `GptOssForCausalLM` | mixture | windows, yarn | yes | with GPUs |" in text
    assert "`PhiForCausalLM`" in next(line for line in text.splitlines() if "its head adds a bias" in line)
